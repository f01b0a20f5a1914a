# make setup | lint | test | test-rest | test-exhaustive | test-oldest-torch | demo | bench
#
# All of it runs in .venv, made from $(PYTHON), pyproject.toml and constraints.txt, and anew when one of these files changes.
# An interpreter given by hand (make demo PYTHON=python3.12) whose torch has CUDA is used as it is, with nothing installed.

PYTHON ?= python3
VENV := .venv
# Releases of Triton besides that of constraints.txt: all that depends on Triton is tested with the second, a part with the others.
SECOND_TRITON := 3.8.0
OTHER_TRITONS := 3.7.1 3.9.0
# The oldest release of torch that is taken. Its wheel is the one for GPUs, with 5 GB of libraries.
OLDEST_TORCH := 2.11.0

ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
CUDA := $(shell $(PYTHON) -c "import torch, triton, einops; print(torch.version.cuda or '')" 2>/dev/null)
endif

.PHONY: setup lint test test-rest test-exhaustive test-oldest-torch demo bench
.DELETE_ON_ERROR:

ifneq ($(CUDA),)

PY := $(PYTHON)

setup:
	@echo "setup: $(PYTHON) has torch for CUDA $(CUDA), triton and einops, and is used as it is."

lint:
	@if $(PY) -c "import ruff, mypy" 2>/dev/null; then $(PY) -m ruff check . && $(PY) -m mypy; \
	else echo "lint: left out, because $(PYTHON) has no ruff or no mypy."; fi

test: lint
	$(PY) -m pytest tests

test-rest test-exhaustive test-oldest-torch:
	@echo "$@: on a GPU \`make test\` runs every test."

DEVICE := --device cuda

else

PY := $(VENV)/bin/python

setup: $(VENV)/.ready

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Two cores: one test process for each, one thread a process. Benchmarks are measured by `make bench`, never here.
test test-rest test-exhaustive test-oldest-torch: export OMP_NUM_THREADS := 1
PYTEST := -m pytest -n 2 --dist worksteal --benchmark-disable --timeout=600
# Python with this release of Triton, and whether it is that one.
with = PYTHONPATH="$(CURDIR)/$(VENV)/triton-$(1)" $(PY)
check = $(call with,$(1)) -c "import triton; v = triton.__version__; assert v == '$(1)', v"
# What compiles with the Triton at hand. Files are named because to collect all takes half a minute.
COMPILED := triton and not (interpreter or exhaustive or gpu)
LAUNCHES := tests/test_replay.py tests/test_repeat.py tests/test_packaging.py
FILES_OF_SMOKE := $$(grep -l mark.launches tests/test_*.py)

# With the second Triton only one test of each kernel; what compiles with it is a part of the rest, and others are exhaustive.
test: lint $(VENV)/triton-$(SECOND_TRITON)/.ready
	$(PY) $(PYTEST) -m "not (rest or exhaustive or gpu) and (smoke or not slow)" --durations=10 tests
	$(call check,$(SECOND_TRITON))
	$(call with,$(SECOND_TRITON)) $(PYTEST) -m smoke $(FILES_OF_SMOKE)

# What `make test` leaves out, but for tests for a GPU; then with the second release of Triton the kernels in Gluon, and with each what steps
# launch, and one test of each kernel where `make test` has not run it.
test-rest: $(VENV)/triton-$(SECOND_TRITON)/.ready $(OTHER_TRITONS:%=$(VENV)/triton-%/.ready)
	@echo "test-rest: about 75 minutes on 2 cores."
	$(PY) $(PYTEST) -m "(rest or (slow and not smoke)) and not (hf or exhaustive or gpu)" --durations=10 tests
	$(PY) $(PYTEST) -m "hf and not exhaustive" $$(grep -l mark.hf tests/test_*.py)
	$(call check,$(SECOND_TRITON))
	$(call with,$(SECOND_TRITON)) $(PYTEST) -m "$(COMPILED)" tests/test_compile_sm90.py $(LAUNCHES)
	$(foreach other,$(OTHER_TRITONS),$(call check,$(other)) && \
	  $(call with,$(other)) $(PYTEST) -m "smoke or ($(COMPILED))" $(LAUNCHES) $(FILES_OF_SMOKE) &&) true

# Not in CI, before a change of kernels: cases of which the rest has a choice, kernels with each configuration above all, and interpreted
# kernels with the second release.
test-exhaustive: $(VENV)/triton-$(SECOND_TRITON)/.ready
	@echo "test-exhaustive: about two hours on 2 quiet cores, reckoned and not measured."
	$(PY) $(PYTEST) -m "exhaustive and not gpu" --durations=10 tests
	$(call check,$(SECOND_TRITON))
	$(call with,$(SECOND_TRITON)) $(PYTEST) -m "triton and not gpu and (interpreter or exhaustive)" tests

# Not in CI, for its size: what depends on torch, and of Triton what make test has.
test-oldest-torch: $(VENV)/torch-$(OLDEST_TORCH)/.ready
	@echo "test-oldest-torch: within an hour on 2 cores."
	$(dir $<)bin/python $(PYTEST) -m "not (hf or exhaustive or gpu or (triton and rest))" --durations=10 tests
	$(dir $<)bin/python $(PYTEST) -m "hf and not exhaustive" $$(grep -l mark.hf tests/test_*.py)

endif

demo: setup
	$(PY) -m bench train --recipe bf16,fp8_delayed,fp8_current,fp8_block,mxfp8,nvfp4 --steps 100 --check --out runs/demo $(DEVICE)

bench: setup
	$(PY) -m bench host
	$(PY) -m bench speed $(DEVICE)
	$(PY) -m bench recipes $(DEVICE)

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt setuptools
	$(PY) -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[test,lint,plots,progress,hf]'
	touch $@

# torch 2.11 takes no setuptools from 82 on.
$(VENV)/torch-%/.ready: $(VENV)/.ready
	$(PYTHON) -m venv --clear $(@D)
	grep -Ev '^(torch|setuptools)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet 'setuptools>=77,<82'
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt --no-build-isolation -e '.[test,plots,progress,hf]' torch==$*
	touch $@

# Another Triton has a folder of its own that stands before the first on the path; everything else is shared.
$(VENV)/triton-%/.ready: $(VENV)/.ready
	$(PY) -m pip install --quiet --no-deps --target $(VENV)/triton-$* triton==$*
	touch $@
