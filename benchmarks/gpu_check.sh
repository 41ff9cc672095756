#!/usr/bin/env bash
# Everything that needs a GPU, and a table of what passed as the last thing: benchmarks/gpu_check.sh [FOLDER]. Needs the CUDA
# toolkit, a device, and torch for CUDA in the environment of `make core` (or in PYTHON). FOLDER receives the logs.
#
# NOT YET RUN ON A GPU.
set -u
cd "$(dirname "$0")/.." || exit 1
logs=${1:-build-gpu/logs}
python=${PYTHON:-.venv/bin/python}
mkdir -p "$logs"
names=() states=()

check() {
  local name=$1 begin=$SECONDS
  shift
  echo "== $name"
  if "$@" >"$logs/$name.log" 2>&1; then
    states+=("passed, $((SECONDS - begin)) s")
  else
    states+=("FAILED, see $logs/$name.log")
    tail -n 15 "$logs/$name.log"
  fi
  names+=("$name")
}

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || {
  echo "there is no CUDA device here (nvidia-smi finds none): nothing can be checked" >&2
  exit 1
}

check build cmake -S . -B build-gpu -DGRADCAST_CUDA=ON -DGRADCAST_BUILD_PYTHON=OFF -DCMAKE_BUILD_TYPE=Release \
  -DNLOHMANN_JSON_HINT="$("$python" -c 'import nlohmann_json; print(nlohmann_json.get_include())')"
check compile cmake --build build-gpu --parallel --target wire_test wire_benchmark gradcast-bench
check kernels build-gpu/tests/wire_test
for tool in memcheck racecheck initcheck synccheck; do
  check "kernels-$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 build-gpu/tests/wire_test \
    --gtest_filter='WireOnDevice.*'
done
check training "$python" -m pytest -q tests/training/test_cuda.py
check training-memcheck compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 "$python" -m pytest -q \
  tests/training/test_cuda.py -k 'plain'
check bench mpirun --allow-run-as-root -n 1 build-gpu/csrc/bench/gradcast-bench --transport nccl
check bandwidth build-gpu/benchmarks/wire_benchmark
cat "$logs/bandwidth.log"

echo
failed=0
for i in "${!names[@]}"; do
  printf '%-20s %s\n' "${names[$i]}" "${states[$i]}"
  case ${states[$i]} in FAILED*) failed=1 ;; esac
done
exit $failed
