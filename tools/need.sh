#!/bin/sh
# Makes sure that the system has what the build needs from outside: a C++20 compiler and Python's headers ("core"), for the
# tests also GoogleTest and Google Benchmark, and MPI and a browser if they can be had ("tests"), for root's demo and tests
# the tools that make a slow link. As root on a machine with apt it installs what is missing; elsewhere it names it.
# Everything else comes from Python packages, into .venv.
set -eu
level=$1
python=${PYTHON:-python3}
missing=
wished=

includes() {
  printf '#include <%s>\nint main() {}\n' "$1" | ${CXX:-c++} -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1
}

find_missing() {
  missing=
  wished=
  includes span || missing="$missing g++"
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' >/dev/null 2>&1 ||
    missing="$missing python3-dev"
  if [ "$level" = tests ]; then
    includes gtest/gtest.h || missing="$missing libgtest-dev"
    includes benchmark/benchmark.h || missing="$missing libbenchmark-dev"
    { command -v mpicxx && command -v mpirun; } >/dev/null || wished=" libopenmpi-dev openmpi-bin"
    { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null ||
      wished="$wished chromium"
  fi
  if [ "$level" != core ] && [ "$(id -u)" = 0 ] && [ "$(uname)" = Linux ]; then
    { command -v ip && command -v tc; } >/dev/null || wished="$wished iproute2"
  fi
}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "gradcast needs Python 3.10 or newer; name one with PYTHON=/path/to/python3 make ..." >&2
  exit 1
fi
find_missing
if [ -n "$missing$wished" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing system packages:$missing$wished"
  export DEBIAN_FRONTEND=noninteractive
  # One by one: a wish that this system has no package for must not keep it from what is needed.
  apt-get -qq update </dev/null >/dev/null || true
  for package in $missing $wished; do
    apt-get -qq install -y --no-install-recommends "$package" </dev/null >/dev/null || true
  done
  find_missing
fi
case $wished in
*iproute2*) echo "iproute2 (as it is named in Debian and Ubuntu) is missing on this machine: there will be no slow link" >&2 ;;
esac
case $wished in
*mpi*) echo "missing on this machine (names as in Debian and Ubuntu): libopenmpi-dev openmpi-bin: the transport over MPI is left out" >&2 ;;
esac
case $wished in
*chromium*) echo "missing on this machine (name as in Debian): chromium: no test looks at the report in a browser" >&2 ;;
esac
if [ -n "$missing" ]; then
  echo "These are missing on this machine (names as in Debian and Ubuntu):$missing" >&2
  echo "Install them, for instance with: sudo apt-get install$missing" >&2
  exit 1
fi
