# Every target first makes the virtual environment it needs. Override: make PYTHON=python3.11 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/*/*)

.PHONY: demo test test-all bench check format clean

# torch first and alone, so that nothing else chooses its build.
$(VENV)/torch: 
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0 "numpy<2.4" "setuptools>=77" wheel ninja
	@touch $@

$(VENV)/ready: $(VENV)/torch pyproject.toml setup.py $(SOURCES)
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[test,check]"
	@touch $@

.cache/megatron/ready: $(VENV)/ready tests/adapters/fetch_megatron.py
	$(BIN)/python tests/adapters/fetch_megatron.py
	@touch $@

.cache/megatron/0.16.1: $(VENV)/ready
	$(BIN)/python tests/adapters/fetch_megatron.py 0.16.1

demo: $(VENV)/ready .cache/megatron/0.16.1
	$(BIN)/npu-ops demo --output report

# The tests are many small tensors: two processes of one thread beat one of two threads.
# Triton decides at import whether to interpret, so that runs on its own.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2

test: check .cache/megatron/ready
	$(PYTEST) -m "not slow"
	TRITON_INTERPRET=1 $(PYTEST) -m "not slow" tests/interpreted

test-all: check .cache/megatron/ready
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreted
	OMP_NUM_THREADS=1 $(BIN)/npu-ops emulate -- python -m pytest -m "not slow" -k npu tests/ops

bench: $(VENV)/ready
	$(BIN)/npu-ops bench --output benchmarks/results

check: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror csrc/*/*.h csrc/*/*.cpp
	$(BIN)/python -m pytest tests/test_layout.py

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*/*.h csrc/*/*.cpp

clean:
	rm -rf $(VENV) .cache build report *.egg-info npu_ops/_native.abi3.so npu_ops/_build_info.json
