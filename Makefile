# Everything a fresh machine needs: `make demo` shows it, `make test` proves it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
STORE ?= palimpsest-runs/demo
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: demo test test-all lint types imports check results clean

demo: $(STAMP)
	$(BIN)/palimpsest demo --store $(STORE)

# Files in their own order: the longest come early, and no worker waits at the end for one of them.
test: $(DEV_STAMP)
	$(PYTEST) -m "not slow"

# Storms, browsers, scale, whole benchmarks: after `make test`, and without its tests.
test-all: $(DEV_STAMP)
	$(PYTEST) -m slow

check: lint types imports test test-all

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP)
	$(BIN)/mypy

imports: $(DEV_STAMP)
	$(BIN)/lint-imports

results: $(STAMP)
	$(BIN)/python -m benchmarks.results.page

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Palimpsest needs Python 3.11 or newer; run: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP) $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
