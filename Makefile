# The two commands of a newcomer are `make demo` and `make test`. Both set up what they need, in .venv and build/, and are
# quick when repeated: a changed C++ file is compiled alone.
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# `make test TORCH=2.15.0` tests with another torch than the pinned one, in an environment and a build folder of its own.
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
BUILD := build$(TORCH:%=-torch-%)
BIN := $(CURDIR)/$(VENV)/bin
# For setup.py, which is told to use the same build folder, and for the tests, which start `gradcast`.
export PATH := $(BIN):$(PATH)
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, each of the many processes of the tests compiles gradcast's Python files anew.
unexport PYTHONDONTWRITEBYTECODE
# For tests of what was built here.
export GRADCAST_BUILD := $(BUILD)
# Where the part for torch is compiled into.
export GRADCAST_CACHE_DIR := $(CURDIR)/$(BUILD)/cache

CXX_FILES = $(shell find include csrc tests benchmarks examples -name '*.h' -o -name '*.cc' -o -name '*.cu')
CONFIGURE = cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPython_EXECUTABLE=$(BIN)/python \
  -Dpybind11_DIR=$$(python -c 'import pybind11; print(pybind11.get_cmake_dir())') \
  -DNLOHMANN_JSON_HINT=$$(python -c 'import nlohmann_json; print(nlohmann_json.get_include())')

.PHONY: help
help:
	@echo 'make demo       train on two workers over a slow link, with and without gradcast; writes demo.png'
	@echo 'make test       what every change must pass: C++ and Python tests, lint (TORCH=2.15.0: with that torch)'
	@echo 'make test-all   the rest: docs, sanitizers, launches, faults, frameworks, networks, the peers'"'"' tests of DDP'
	@echo 'make test-long  hours: many more seeds, a soak, valgrind (make test-valgrind), fuzzers (make fuzz)'
	@echo 'make docs       build the documentation into build/site; broken links fail'
	@echo 'make wheels     wheels of the package into dist/, one for each Python that is here'
	@echo 'make benchmark  time the planner, the engine and int8'
	@echo 'make gpu-kit    build what benchmarks/gpu_check.py runs on a machine with a GPU'
	@echo 'make core       build and install what training needs;  make all  also tests and benchmarks'
	@echo 'make lint       check style only;  make format  fix it'
	@echo 'make clean      remove everything that make made'

.PHONY: demo
demo: core
	@tools/need.sh demo
	@python -c 'from gradcast.training.compat import extension; extension.load()'
	python -m benchmarks.demo

# Runs each target of a list, also after one has failed, so that one run shows all failures. Ends with the counts of the
# result files that these targets have written.
CHECK = @status=0; \
  for check in $(1); do $(MAKE) --no-print-directory $$check || status=1; done; \
  python tools/count_results.py $$status $(2:%=$(BUILD)/%.xml)

.PHONY: test
test: all
	$(call CHECK,test-cpp test-python lint,ctest pytest)

# Documentation and sanitizers do not depend on torch, and docs/evaluation/peers.md is about the pinned one.
.PHONY: test-all
test-all: all
	$(call CHECK,$(if $(TORCH),$(SLOW),docs test-tsan test-asan $(SLOW) test-peers),\
	  $(if $(TORCH),,ctest-tsan ctest-asan pytest-peers) pytest-slow pytest-measuring)

# What benchmarks/gpu_check.py needs on a machine with a GPU, compiled here into build-gpu/kit, which is carried there:
# make gpu-kit GPU_ARCH=80 GPU_PYTHON='python3.11 python3.12'.
GPU_ARCH ?= 90
GPU_PYTHON ?= python
.PHONY: gpu-kit
gpu-kit: $(VENV)/tools.stamp
	@tools/need.sh tests
	python -m benchmarks.gpu_kit --arch $(GPU_ARCH) --python $(GPU_PYTHON)

.PHONY: test-cpp
test-cpp: all
	@rm -f $(BUILD)/ctest.xml
	ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS) --output-junit ctest.xml

# Two at a time: most tests wait for other processes. The tests of a file share what they set up. Files begin in the order of
# tests/conftest.py.
PYTEST_TWO = pytest -n 2 --dist loadfile --no-loadscope-reorder
.PHONY: test-python
test-python: test-modules
	@rm -f $(BUILD)/pytest.xml
	@python -c 'from gradcast.training.compat import extension; extension.load()'
	$(PYTEST_TWO) --junitxml=$(BUILD)/pytest.xml -m 'not slow and not long'

# Slow tests of what measures have the cores for themselves. (pytest ignores no folder that its configuration names.)
MEASURING := tests/lab tests/diagnosis
SLOW := test-slow test-measuring
.PHONY: test-slow
test-slow: all $(VENV)/torchft.stamp
	@rm -f $(BUILD)/pytest-slow.xml
	GRADCAST_TORCHFT_PYTHON=$(CURDIR)/$(VENV)/torchft/bin/python \
	  $(PYTEST_TWO) --junitxml=$(BUILD)/pytest-slow.xml -m 'slow and not long' tests \
	    $(patsubst %,--ignore=%,tests/nccl_mirror tests/peers $(MEASURING))

.PHONY: test-measuring
test-measuring: all $(VENV)/hta.stamp
	@rm -f $(BUILD)/pytest-measuring.xml
	GRADCAST_HTA_PYTHON=$(CURDIR)/$(VENV)/hta/bin/python pytest --junitxml=$(BUILD)/pytest-measuring.xml \
	  -m 'slow and not long' $(MEASURING)

# Others' tests of DDP, with gradcast in its place (docs/evaluation/peers.md).
.PHONY: test-peers
test-peers: core
	@rm -f $(BUILD)/pytest-peers.xml
	pytest tests/peers --junitxml=$(BUILD)/pytest-peers.xml -o junit_family=xunit1

# The C++ tests once more under the compilers' checkers: of threads on the engine, of memory and undefined behaviour on
# everything. Clang where it is at hand: it builds them twice as fast, and checks the engine's locks while it compiles.
, := ,
SANITIZED = $(CONFIGURE) -DCMAKE_CXX_FLAGS_RELEASE='-O1 -g1' -DGRADCAST_BUILD_PYTHON=OFF -DGRADCAST_BUILD_BENCHMARKS=OFF \
  -DGRADCAST_CUDA=OFF -DGRADCAST_MPI=OFF -DGRADCAST_SANITIZE=$(1) \
  $$(echo 'int main() {}' | clang++ -fsanitize=$(1) -x c++ -o /dev/null - 2>/dev/null && \
    echo -DCMAKE_CXX_COMPILER=clang++)
CTEST_SANITIZED = ctest --label-regex unit --no-tests=error --output-on-failure --parallel $(JOBS)
.PHONY: test-sanitize
test-sanitize: test-tsan test-asan

.PHONY: test-tsan
test-tsan: $(VENV)/tools.stamp
	@tools/need.sh tests
	@mkdir -p $(BUILD) && rm -f $(BUILD)/ctest-tsan.xml
	@$(call SANITIZED,thread) -B $(BUILD)-tsan >/dev/null
	@cmake --build $(BUILD)-tsan --target threaded_tests --parallel $(JOBS)
	$(CTEST_SANITIZED) --test-dir $(BUILD)-tsan --output-junit $(CURDIR)/$(BUILD)/ctest-tsan.xml

.PHONY: test-asan
test-asan: $(VENV)/tools.stamp
	@tools/need.sh tests
	@mkdir -p $(BUILD) && rm -f $(BUILD)/ctest-asan.xml
	@$(call SANITIZED,address$(,)undefined) -B $(BUILD)-asan >/dev/null
	@cmake --build $(BUILD)-asan --target core_test sim_test threaded_tests --parallel $(JOBS)
	GRADCAST_SEED_FACTOR=0.05 $(CTEST_SANITIZED) --test-dir $(BUILD)-asan --output-junit $(CURDIR)/$(BUILD)/ctest-asan.xml

# Many more seeds of every randomized test, many more mutated files, a wheel built and used from nothing, and the fuzzers
# where clang is at hand. Hours at most; SEED_FACTOR and FUZZ_SECONDS set how long.
SEED_FACTOR ?= 10
FUZZ_SECONDS ?= 60
.PHONY: test-long
test-long: all
	GRADCAST_SEED_FACTOR=$(SEED_FACTOR) ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS) --timeout 14400
	pytest -m long
	@$(MAKE) --no-print-directory test-valgrind
	@$(MAKE) --no-print-directory fuzz

# The bindings under valgrind, where it is at hand: what crosses between Python and C++.
.PHONY: test-valgrind
test-valgrind: test-modules
	@command -v valgrind >/dev/null || { echo 'left out: valgrind is missing here (apt-get install valgrind)'; exit 0; }; \
	set -e; PYTHONMALLOC=malloc valgrind --log-file=$(BUILD)/valgrind.log python -m pytest -q -p no:cacheprovider \
	  tests/bindings/test_bindings.py tests/bindings/test_engine.py; python tools/check_valgrind.py $(BUILD)/valgrind.log

.PHONY: fuzz
fuzz: $(VENV)/tools.stamp
	@command -v clang++ >/dev/null || { echo 'the fuzzers are left out: they need clang++, which is missing here'; exit 0; }; \
	set -e; $(CONFIGURE) -B $(BUILD)-fuzz -DCMAKE_CXX_COMPILER=clang++ -DGRADCAST_BUILD_FUZZERS=ON \
	  -DGRADCAST_BUILD_PYTHON=OFF -DGRADCAST_BUILD_TESTS=OFF -DGRADCAST_BUILD_BENCHMARKS=OFF -DGRADCAST_BUILD_BENCH=OFF \
	  -DGRADCAST_CUDA=OFF -DGRADCAST_MPI=OFF -DGRADCAST_SANITIZE=address,undefined >/dev/null; \
	cmake --build $(BUILD)-fuzz --parallel $(JOBS); \
	mkdir -p $(BUILD)-fuzz/corpus; \
	$(BUILD)-fuzz/tests/fuzz/fuzz_readers -max_total_time=$(FUZZ_SECONDS) -seed=1 -max_len=4096 -print_final_stats=1 \
	  $(BUILD)-fuzz/corpus tests/fuzz/corpus

# The documentation's site. Its pages of commands are made by running them.
.PHONY: docs
docs: core $(VENV)/docs.stamp
	@NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build --strict --site-dir $(CURDIR)/$(BUILD)/site
	@echo 'the documentation is in $(BUILD)/site/index.html'

# Wheels into dist/, for each of PYTHONS that is at hand: for machines without a compiler. gradcast-bench in them has
# neither MPI nor CUDA, whose libraries differ from machine to machine.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
.PHONY: wheels
wheels: $(VENV)/wheels.stamp
	@rm -rf $(BUILD)/wheels dist; for python in $(PYTHONS); do \
	  $$python -c '' 2>/dev/null || { echo "left out: $$python is not here"; continue; }; \
	  echo "building for $$($$python --version)"; \
	  CMAKE_ARGS='-DGRADCAST_MPI=OFF -DGRADCAST_CUDA=OFF' $$python -m pip wheel --quiet --no-deps --wheel-dir $(BUILD)/wheels . \
	    </dev/null || exit 1; \
	done; \
	PATH=$(CURDIR)/$(VENV)/wheels/bin:$$PATH auditwheel repair --wheel-dir dist $(BUILD)/wheels/*.whl && ls dist

# For systems older than this one: built in their image, for each Python that pyproject.toml names. Needs Docker.
.PHONY: wheels-portable
wheels-portable: $(VENV)/wheels.stamp
	@rm -rf dist
	$(VENV)/wheels/bin/cibuildwheel --output-dir dist

.PHONY: benchmark
benchmark: all
	$(BUILD)/benchmarks/core_benchmark
	$(BUILD)/benchmarks/engine_benchmark
	$(BUILD)/benchmarks/wire_benchmark

.PHONY: lint
lint: $(VENV)/tools.stamp
	ruff check .
	ruff format --check --quiet .
	clang-format --dry-run --Werror $(CXX_FILES)
	mypy
	@command -v actionlint >/dev/null || { \
	  echo 'left out: actionlint is missing here (pip install -r tools/actionlint.txt)'; exit 0; }; actionlint

.PHONY: format
format: $(VENV)/tools.stamp
	ruff check --quiet --fix .
	ruff format --quiet .
	clang-format -i $(CXX_FILES)

# --- How it is built ---------------------------------------------------------------------------------------------------

# The Python module, put into python/gradcast, and the package, installed so that the tree itself is what runs.
.PHONY: core
core: $(BUILD)/core.stamp
	@cmake --build $(BUILD) --target _core --parallel $(JOBS)
	@$(MAKE) --no-print-directory $(VENV)/package.stamp

# And what the Python tests need beside it: modules of their own, which no wheel contains.
.PHONY: test-modules
test-modules: $(BUILD)/all.stamp
	@cmake --build $(BUILD) --target _core test_modules --parallel $(JOBS)
	@$(MAKE) --no-print-directory $(VENV)/package.stamp

.PHONY: all
all: $(BUILD)/all.stamp
	@cmake --build $(BUILD) --parallel $(JOBS)
	@$(MAKE) --no-print-directory $(VENV)/package.stamp

# Every pinned package of pyproject.toml: what builds, tests and checks.
$(VENV)/tools.stamp: pyproject.toml tools/need.sh
	@tools/need.sh core
	@echo 'making $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet $$(grep -oE '"[A-Za-z0-9_.-]+==[^"]+"' pyproject.toml | tr -d '"' \
	  $(if $(TORCH),| sed 's/^torch==.*/torch==$(TORCH)/')) </dev/null
	@touch $@

# In an environment of its own: the newest numpy is not that of the tests.
$(VENV)/hta.stamp: $(VENV)/tools.stamp tools/hta.txt
	@$(PYTHON) -m venv $(VENV)/hta
	@$(VENV)/hta/bin/python -m pip install --quiet --no-deps -r tools/hta.txt </dev/null
	@touch $@

# In an environment of its own, because of OpenTelemetry. It sees the packages of the other one, torch above all.
$(VENV)/torchft.stamp: $(VENV)/tools.stamp tools/torchft.txt
	@$(PYTHON) -m venv $(VENV)/torchft
	@$(VENV)/torchft/bin/python -m pip install --quiet --no-deps -r tools/torchft.txt </dev/null
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VENV)/torchft/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	@touch $@

# In an environment of its own: only `make docs` needs it.
$(VENV)/docs.stamp: docs/requirements.txt
	@$(PYTHON) -m venv $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install --quiet --requirement docs/requirements.txt </dev/null
	@touch $@

# In an environment of its own: only `make wheels` needs it.
$(VENV)/wheels.stamp: tools/wheels.txt
	@$(PYTHON) -m venv $(VENV)/wheels
	@$(VENV)/wheels/bin/python -m pip install --quiet -r tools/wheels.txt </dev/null
	@touch $@

$(VENV)/package.stamp: $(VENV)/tools.stamp setup.py
	@GRADCAST_BUILD_DIR=$(BUILD) python -m pip install --quiet --no-build-isolation --no-deps --editable . </dev/null
	@touch $@

$(BUILD)/core.stamp: $(VENV)/tools.stamp
	@$(CONFIGURE) -DGRADCAST_BUILD_TESTS=OFF -DGRADCAST_BUILD_BENCHMARKS=OFF >/dev/null
	@touch $@

# Newer than core.stamp always, so that a later `make demo` does not switch the tests off again.
$(BUILD)/all.stamp: $(VENV)/tools.stamp
	@tools/need.sh tests
	@$(CONFIGURE) -DGRADCAST_BUILD_TESTS=ON -DGRADCAST_BUILD_BENCHMARKS=ON >/dev/null
	@touch $(BUILD)/core.stamp $@

.PHONY: clean
clean:
	rm -rf .venv .venv-torch-* build build-* dist demo.png python/*.egg-info python/gradcast/_core.*.so .pytest_cache .mypy_cache \
	  .ruff_cache .hypothesis
