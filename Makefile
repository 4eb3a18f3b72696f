PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Without an NVIDIA driver torch is a CPU build, unless TORCH=any says that CUDA packages are welcome.
NVIDIA := $(wildcard /proc/driver/nvidia/version)$(shell command -v nvidia-smi 2>/dev/null)
ifeq ($(TORCH)$(NVIDIA),)
CONSTRAINTS := -c constraints-cpu.txt
endif

.DEFAULT_GOAL := help
.PHONY: help venv demo test check clean reproduce-small

help:
	@echo 'make demo    install into .venv, fetch the offline target, decode with and without the loop'
	@echo 'make test    install and run the CPU test suite'
	@echo 'make check   format, lint, types and the fast tests'
	@echo 'make venv    install only'
	@echo 'make reproduce-small PROMPTS=FILE    the loop measured from nothing on one GPU, in calls that can be stopped and go on'
	@echo 'make clean   remove caches and build products; .venv and results stay'
	@echo 'PYTHON=python3.12 chooses the interpreter (3.11 to 3.13); TORCH=any accepts CUDA packages on a machine without a driver'

venv: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/dloop demo

# Tiny models gain nothing from a second thread, and threads of busy cores wait for one another: one thread a worker.
# Each worker begins with a stretch of the suite and takes over what others have left: few fixtures are made twice.
test check: export OMP_NUM_THREADS ?= 1
WORKERS ?= 2

test: $(INSTALLED)
	$(BIN)/python -m dloop.offline
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu"

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu"

# Calls of under 9 minutes, each of which goes on where the last one ended, until none says that the time is up (75).
# ARGS: see scripts/reproduce_small.py --help
PERFECTBLEND := cache/dataset/perfectblend_train.jsonl
PROMPTS ?= $(PERFECTBLEND)
reproduce-small: $(INSTALLED) $(PROMPTS)
	@code=75; while [ $$code -eq 75 ]; do \
		$(BIN)/python scripts/reproduce_small.py --prompts $(PROMPTS) $(ARGS); code=$$?; \
	done; exit $$code

$(PERFECTBLEND): | $(INSTALLED)
	$(BIN)/dloop data prepare --dataset perfectblend

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "dloop needs Python 3.11 to 3.13, $(PYTHON) is another or missing: make ... PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

$(INSTALLED): pyproject.toml constraints-cpu.txt | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
ifdef CONSTRAINTS
	@# From 25.3 on, a dry run with fast-deps reads a remote wheel's metadata without downloading the wheel.
	@$(BIN)/python -m pip install --quiet --quiet --upgrade 'pip>=25.3,<27'
	@report=$$($(BIN)/python -m pip install --quiet --quiet --dry-run --use-feature=fast-deps --report - $(CONSTRAINTS) torch) || exit 2; \
	if printf '%s\n' "$$report" | grep -qE '^ *"name": "(nvidia|cuda)-'; then \
		echo "stopped: the package index would bring gigabytes of CUDA packages and this machine has no NVIDIA driver; install torch==2.13.0 from PyTorch's CPU wheel index into $(VENV) first ($(BIN)/python -m pip install torch==2.13.0 --index-url ...) and make again, or accept the packages: make ... TORCH=any" >&2; \
		exit 2; \
	fi
endif
	$(BIN)/python -m pip install $(CONSTRAINTS) -e '.[demo,dev,plot]'
	@touch $@
