#!/usr/bin/env bash
# Everything that needs a GPU, and a table of what passed as the last thing: benchmarks/gpu_check.sh [FOLDER], which receives
# the logs and, line by line, the table. What skips itself or is left out has not passed. Where the time is bounded, in
# several goes: ONLY='training|extension' runs the checks whose names match; configure and compile go on where the last go
# ended. A check that takes longer than CHECK_S seconds (600) is ended, and has failed.
#
# Needs a device, the CUDA toolkit, cmake, and a Python (PYTHON, else python3) with torch for CUDA, pybind11, pytest and
# tabulate. GoogleTest and nlohmann-json are the system's, or those that `make gpu-needs` has put into
# build-gpu/needs on another machine; NCCL is the system's, or that of torch.
set -u
cd "$(dirname "$0")/.." || exit 1
build="build-gpu"
logs=${1:-$build/logs}
python=${PYTHON:-python3}
needs=$PWD/$build/needs
mkdir -p "$logs"
names=() states=()

note() {
  names+=("$1")
  states+=("$2")
  printf '%-20s %s\n' "$1" "$2" >>"$logs/table.txt"
}

check() {
  local name=$1 begin=$SECONDS
  shift
  [[ $name =~ ${ONLY:-.} ]] || return 0
  echo "== $name"
  if ! timeout -k 10 "${CHECK_S:-600}" "$@" >"$logs/$name.log" 2>&1; then
    left_out=$(sed -n 's/^left out, because.*: //p' "$logs/$name.log" | paste -s -d ';')
    note "$name" "FAILED, ${left_out:+left out: $left_out, }see $logs/$name.log"
    tail -n 15 "$logs/$name.log"
  elif grep -qE '\[  SKIPPED \]|[0-9]+ skipped' "$logs/$name.log"; then
    note "$name" "FAILED, something was skipped, see $logs/$name.log"
  elif grep -q '^NCCL refuses' "$logs/$name.log"; then
    note "$name" "passed, $((SECONDS - begin)) s, but over Gloo: NCCL refuses two ranks here, see $logs/$name.log"
  else
    note "$name" "passed, $((SECONDS - begin)) s"
  fi
}

if ! device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader); then
  echo "there is no CUDA device here (nvidia-smi finds none): nothing can be checked" >&2
  exit 1
fi

run="$(date -u +%F), $device, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
echo "$run" >>"$logs/table.txt"

# Of the NCCL that torch brings: the include folder and the library.
nccl=$("$python" -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0])' 2>/dev/null) || nccl=/nonexistent
options=(-DGRADCAST_CUDA=ON -DGRADCAST_BUILD_BENCHMARKS=OFF -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")"
  -DCMAKE_PREFIX_PATH="$needs/usr" -DNLOHMANN_JSON_HINT="$needs/include"
  -Dpybind11_DIR="$("$python" -c 'import pybind11; print(pybind11.get_cmake_dir())')")
if [ -e "$nccl/lib/libnccl.so.2" ]; then
  options+=(-DNCCL_INCLUDE_DIR="$nccl/include" -DNCCL_LIBRARY="$nccl/lib/libnccl.so.2")
fi
export PYTHONPATH=$PWD/python:$PWD/tests:$PWD${PYTHONPATH:+:$PYTHONPATH}
export GRADCAST_CACHE_DIR=$PWD/$build/cache
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # sums in the same order each time, for comparing bits

check configure cmake -S . -B $build "${options[@]}"
check compile cmake --build $build --parallel "$(nproc)" --target _core nccl_device_test nccl_mirror gradcast-bench
check extension "$python" -c 'from gradcast.training.compat import extension; extension.load()'

check nccl $build/tests/nccl_device_test
# NCCL and torch try calls that a device may refuse, and take another way: only what happens to memory counts there.
check nccl-memcheck compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 $build/tests/nccl_device_test

check training "$python" -m pytest -q -rs -p no:cacheprovider tests/training/step/test_cuda.py
train=("$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 benchmarks/gpu_training.py)
check training-speed "${train[@]}" --trace "$logs/trace.json"
# Numbers and order over the real NCCL; its times say nothing.
check training-nccl "${train[@]}" --backend nccl --steps 24
# Beside other collectives, with other operations and wires, and failures.
check cases-nccl "$python" -m benchmarks.gpu_cases
# The tests of `training` over NCCL, two ranks on one device.
if ! grep -qs '^NCCL refuses' "$logs/cases-nccl.log"; then
  check tests-nccl env GRADCAST_TEST_BACKEND=cpu:gloo,cuda:nccl "$python" -m pytest -q -rs -p no:cacheprovider \
    tests/training/step/test_cuda.py
elif [[ tests-nccl =~ ${ONLY:-.} ]]; then
  note tests-nccl "left out: NCCL refuses two ranks on one device here"
fi
check bandwidth "$python" -m benchmarks.gpu_bandwidth
for tool in "memcheck --report-api-errors no" racecheck initcheck synccheck; do
  # shellcheck disable=SC2086 # options of the tool go along
  check "training-${tool%% *}" compute-sanitizer --tool $tool --target-processes all --error-exitcode 9 "${train[@]}" --steps 8 --width 64
done
# torch's own: reads and writes of one tensor on two streams without an order between them.
check training-streams env TORCH_CUDA_SANITIZER=1 "${train[@]}" --steps 8 --width 64
# Over NCCL, in fewer steps: the tools slow its kernels, which wait for each other.
check training-memcheck-nccl compute-sanitizer --tool memcheck --report-api-errors no --target-processes all --error-exitcode 9 \
  "${train[@]}" --backend nccl --steps 6 --width 32
check training-streams-nccl env TORCH_CUDA_SANITIZER=1 "${train[@]}" --backend nccl --steps 8 --width 64

# Steps beside 15 ranks that are only mirrored, each in at most ten minutes. $logs/traces shows where a step's time goes.
mirror=("$python" -m benchmarks.nccl_mirror.mirror --library "$build/benchmarks/nccl_mirror/libnccl.so.2")
mkdir -p "$logs/traces"
for gbit in 25 100 400; do
  check mirror-$gbit "${mirror[@]}" --gbit $gbit --traces "$logs/traces"
done
for model in ResNet GPT; do
  check "mirror-10-$model" "${mirror[@]}" --gbit 10 --models $model --turns 3 --traces "$logs/traces"
done
some=(--gbit 25,100 --ways "alone,DDP 25 MiB,gradcast hook,gradcast overlap")
check mirror-foreach "${mirror[@]}" "${some[@]}" --optimizer foreach
check mirror-compiled "${mirror[@]}" "${some[@]}" --compiled
check mirror-compiled-foreach "${mirror[@]}" "${some[@]}" --compiled --optimizer foreach

if command -v mpirun >/dev/null; then
  check bench mpirun --allow-run-as-root -n 1 python/gradcast/bin/gradcast-bench --transport nccl
elif [[ bench =~ ${ONLY:-.} ]]; then
  note bench "left out: there is no mpirun here"
fi
echo
cat "$logs/training-speed.log" "$logs/cases-nccl.log" "$logs/bandwidth.log" "$logs"/mirror*.log 2>/dev/null
echo
echo "$run"
failed=0
for i in "${!names[@]}"; do
  printf '%-20s %s\n' "${names[$i]}" "${states[$i]}"
  case ${states[$i]} in FAILED*) failed=1 ;; esac
done
exit $failed
