# `make demo` and `make test` need Python 3.11 or newer and nothing else: each makes its own virtual environment.
#
#   PYTHON=python3.13                                       use this interpreter
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu        take torch from there (a machine without an NVIDIA card)
#   TEST_ARGS="tests/convert -k layer"                      further arguments of pytest
#   DEMO_ARGS="--help"                                      arguments of mla-convert demo

VENV ?= .venv
PYTHON ?=
TORCH_INDEX ?=
TEST_ARGS ?=
DEMO_ARGS ?=

BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt

.PHONY: help test demo lint fix clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help:
	@echo "make demo    convert, verify and evaluate a real pretrained model (DEMO_ARGS=...)"
	@echo "make test    style, types, import direction and the tests (TEST_ARGS=...)"
	@echo "make lint    the same without the tests"
	@echo "make fix     format the code and apply ruff's safe fixes"
	@echo "make clean   remove the virtual environment and everything that tools left here"
	@echo "Set TORCH_INDEX=https://download.pytorch.org/whl/cpu on a machine without an NVIDIA card."

demo: $(VENV)/.installed
	@echo "==> mla-convert demo"
	@$(BIN)/mla-convert demo $(DEMO_ARGS)

test: lint
	@echo "==> pytest"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile $(TEST_ARGS)

lint: $(VENV)/.installed-dev
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@$(BIN)/mypy
	@echo "==> lint-imports"
	@$(BIN)/lint-imports --no-logo

fix: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The tools of `make test` come on top, so that environment serves the demo as well.
$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "==> installing the test tools into $(VENV)"
	@$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@

$(VENV)/.installed: $(INPUTS) $(VENV)/.made
	@if [ -n "$(TORCH_INDEX)" ]; then \
		echo "==> installing torch from $(TORCH_INDEX)"; \
		$(PIP_INSTALL) --no-deps --index-url "$(TORCH_INDEX)" torch; \
	fi
	@echo "==> installing mla-convert and its pinned dependencies into $(VENV) (the first time: some minutes)"
	@$(PIP_INSTALL) setuptools
	@$(PIP_INSTALL) --no-build-isolation -e .
	@touch $@

# An interpreter counts only if it runs: a name on the path may be an empty shim.
$(VENV)/.made:
	@chosen=; bare=; \
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		"$$python" -c 'import ensurepip, venv' 2>/dev/null && { chosen=$$python; break; }; \
		bare=$${bare:-$$python}; \
	done; \
	if [ -z "$$chosen" ] && [ -n "$$bare" ]; then \
		version=$$("$$bare" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
		echo "error: $$bare has no venv module: run 'apt install python$$version-venv', then make again" >&2; exit 1; \
	elif [ -z "$$chosen" ]; then \
		echo "error: no Python 3.11 or newer found ($(or $(PYTHON),python3)): 'apt install python3 python3-venv', or set PYTHON" >&2; exit 1; \
	fi; \
	echo "==> making a virtual environment in $(VENV) with $$chosen ($$("$$chosen" -V))"; \
	"$$chosen" -m venv --clear $(VENV)
	@touch $@
