# The two commands of a newcomer are `make demo` and `make test`. Both set up what they need, in .venv and build/, and are
# quick when repeated: a changed C++ file is compiled alone.
PYTHON ?= python3
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BIN := $(CURDIR)/.venv/bin
BUILD := build
# For setup.py, which is told to use the same build folder, and for the tests, which start `gradcast`.
export PATH := $(BIN):$(PATH)
export PYTHON
export PIP_DISABLE_PIP_VERSION_CHECK := 1

CXX_FILES = $(shell find include csrc tests benchmarks -name '*.h' -o -name '*.cc')
CONFIGURE = cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPython_EXECUTABLE=$(BIN)/python \
  -Dpybind11_DIR=$$(python -c 'import pybind11; print(pybind11.get_cmake_dir())') \
  -DNLOHMANN_JSON_HINT=$$(python -c 'import nlohmann_json; print(nlohmann_json.get_include())')

.PHONY: help
help:
	@echo 'make demo       compare all policies on a bundled profile; writes demo.png'
	@echo 'make test       everything that must pass: C++ and Python tests, lint'
	@echo 'make test-long  what takes longer: many more seeds, fuzzers (make fuzz)'
	@echo 'make benchmark  time the planner'
	@echo 'make lint       check style only;  make format  mend it'
	@echo 'make clean      remove everything that make made'

.PHONY: demo
demo: core
	gradcast simulate resnet50 --scale 0.5 --bandwidth 5gbit --workers 8 --latency 50us --policy all --plot demo.png

# All checks run, also after one has failed, so that one run shows everything there is to mend.
.PHONY: test
test: all
	@status=0; \
	for check in test-cpp test-python lint; do $(MAKE) --no-print-directory $$check || status=1; done; \
	exit $$status

.PHONY: test-cpp
test-cpp: all
	@rm -f $(BUILD)/ctest.xml
	ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS) --output-junit ctest.xml

.PHONY: test-python
test-python: core
	@rm -f $(BUILD)/pytest.xml
	pytest --junitxml=$(BUILD)/pytest.xml -m 'not long'

# Many more seeds of every randomized test, many more mutated files, a wheel built and used from nothing, and the fuzzers
# where clang is at hand. Hours at most; SEED_FACTOR and FUZZ_SECONDS set how long.
SEED_FACTOR ?= 10
FUZZ_SECONDS ?= 60
.PHONY: test-long
test-long: all
	GRADCAST_SEED_FACTOR=$(SEED_FACTOR) ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS) --timeout 14400
	pytest -m long
	@$(MAKE) --no-print-directory fuzz

.PHONY: fuzz
fuzz: .venv/tools.stamp
	@command -v clang++ >/dev/null || { echo 'the fuzzers are left out: they need clang++, which is missing here'; exit 0; }; \
	set -e; $(CONFIGURE) -B $(BUILD)-fuzz -DCMAKE_CXX_COMPILER=clang++ -DGRADCAST_BUILD_FUZZERS=ON \
	  -DGRADCAST_BUILD_PYTHON=OFF -DGRADCAST_BUILD_TESTS=OFF -DGRADCAST_BUILD_BENCHMARKS=OFF \
	  -DGRADCAST_SANITIZE=address,undefined >/dev/null; \
	cmake --build $(BUILD)-fuzz --parallel $(JOBS); \
	mkdir -p $(BUILD)-fuzz/corpus; \
	$(BUILD)-fuzz/tests/fuzz/fuzz_readers -max_total_time=$(FUZZ_SECONDS) -seed=1 -max_len=4096 -print_final_stats=1 \
	  $(BUILD)-fuzz/corpus tests/fuzz/corpus

.PHONY: benchmark
benchmark: all
	$(BUILD)/benchmarks/core_benchmark

.PHONY: lint
lint: .venv/tools.stamp
	ruff check .
	ruff format --check --quiet .
	clang-format --dry-run --Werror $(CXX_FILES)

.PHONY: format
format: .venv/tools.stamp
	ruff check --quiet --fix .
	ruff format --quiet .
	clang-format -i $(CXX_FILES)

# --- How it is built ---------------------------------------------------------------------------------------------------

# The Python module, put into python/gradcast, and the package, installed so that the tree itself is what runs.
.PHONY: core
core: $(BUILD)/core.stamp
	@cmake --build $(BUILD) --target _core --parallel $(JOBS)
	@$(MAKE) --no-print-directory .venv/package.stamp

.PHONY: all
all: $(BUILD)/all.stamp
	@cmake --build $(BUILD) --parallel $(JOBS)
	@$(MAKE) --no-print-directory .venv/package.stamp

# Every pinned package of pyproject.toml: what builds, tests and checks.
.venv/tools.stamp: pyproject.toml tools/need.sh
	@tools/need.sh core
	@echo 'making .venv'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet $$(grep -oE '"[A-Za-z0-9_.-]+==[^"]+"' pyproject.toml | tr -d '"') </dev/null
	@touch $@

.venv/package.stamp: .venv/tools.stamp setup.py
	@GRADCAST_BUILD_DIR=$(BUILD) python -m pip install --quiet --no-build-isolation --no-deps --editable . </dev/null
	@touch $@

$(BUILD)/core.stamp: .venv/tools.stamp
	@$(CONFIGURE) -DGRADCAST_BUILD_TESTS=OFF -DGRADCAST_BUILD_BENCHMARKS=OFF >/dev/null
	@touch $@

# Newer than core.stamp always, so that a later `make demo` does not switch the tests off again.
$(BUILD)/all.stamp: .venv/tools.stamp
	@tools/need.sh tests
	@$(CONFIGURE) -DGRADCAST_BUILD_TESTS=ON -DGRADCAST_BUILD_BENCHMARKS=ON >/dev/null
	@touch $(BUILD)/core.stamp $@

.PHONY: clean
clean:
	rm -rf .venv $(BUILD) build-* dist demo.png python/*.egg-info python/gradcast/_core.*.so .pytest_cache .ruff_cache .hypothesis
