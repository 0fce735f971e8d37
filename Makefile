# make demo | test | lint | docs | bench: each makes .venv first, at the versions in constraints.txt.
# PYTHON=python3.12 chooses another Python; ARGS="..." goes to the command; PROCESSOR=avx2 or PROCESSOR=default (no
# vector registers at all) has the tests computed as on an older one.

PYTHON ?= python3
ARGS ?=
PROCESSOR ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
TRITON := 3.9.0
INSTALL := $(PIP) install --disable-pip-version-check -c constraints.txt

# of torch, MKL, oneDNN, and NumPy's OpenBLAS, by which Triton's kernels are interpreted
OLDER := MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell
# (what torch compiles has a cache of its own, whose code is not for another)
AS_ON := $(if $(PROCESSOR),ATEN_CPU_CAPABILITY=$(PROCESSOR) $(OLDER) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/.pytest_cache/inductor-$(PROCESSOR))

.PHONY: demo test lint docs bench venv constraints clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/figures.stamp
	$(BIN)/trailmark demo $(ARGS)

# one process on each of two cores, a thread each: half the time of one process with two threads
test: $(VENV)/test.stamp
	$(AS_ON) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/lint.stamp
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	cd benchmarks && ../$(BIN)/python -m mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache/benchmarks *.py case_study
	$(BIN)/lint-imports --no-logo

# the site, in build/site; a warning is an error
docs: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)

bench: $(VENV)/figures.stamp
	$(BIN)/python benchmarks/ops.py $(ARGS)

# everything a developer needs
venv: $(VENV)/test.stamp $(VENV)/lint.stamp $(VENV)/docs.stamp

# Python is checked before the environment is made, and an environment that was here already too
$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("trailmark needs Python 3.11 or newer; $(PYTHON) is " + v + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch by itself: its wheel is by far the largest, and a failure here is easier to read
$(VENV)/torch.stamp: constraints.txt | $(BIN)/python
	@$(BIN)/python -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit("trailmark needs Python 3.11 or newer; $(VENV) has " + v + ". Remove $(VENV) and try: make PYTHON=python3.12")'
	$(INSTALL) torch
	@touch $@

$(VENV)/figures.stamp: pyproject.toml constraints.txt $(VENV)/torch.stamp
	$(INSTALL) -e '.[figures]'
	@touch $@

# CUDA builds of torch have brought the Triton that they need; for others it interprets the kernels in the tests
$(VENV)/test.stamp: pyproject.toml constraints.txt $(VENV)/torch.stamp
	@if $(BIN)/python -c 'import platform, sys; from importlib.util import find_spec; sys.exit(sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64") or find_spec("triton") is not None)'; \
	  then $(INSTALL) triton==$(TRITON); fi
	$(INSTALL) -e '.[test,convert,figures,faiss,data,lm-eval,rouge,serve]'
	@touch $@

# (mypy reads the types of what the server is made of)
$(VENV)/lint.stamp: pyproject.toml constraints.txt $(VENV)/torch.stamp
	$(INSTALL) -e '.[lint,serve]'
	@touch $@

$(VENV)/docs.stamp: pyproject.toml constraints.txt $(VENV)/torch.stamp
	$(INSTALL) -e '.[docs]'
	@touch $@

# The pins of this environment. "+cpu" and the packages of one platform's torch are left out: torch names
# those itself, exactly.
constraints: venv
	{ echo '# Tested versions; every install of the Makefile uses them. Made by "make constraints" from .venv.'; \
	  $(PIP) freeze --all --exclude-editable --exclude pip \
	    | sed -e 's/+[A-Za-z0-9.]*$$//' | grep -v -i -E '^(nvidia-|cuda-|triton)'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
