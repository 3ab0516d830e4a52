# Two commands: `make run` (a draft and its report) and `make test` (everything CI runs).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RECIPE ?= recipes/code.yaml
WORKERS ?= 2

.PHONY: run test check lint types contracts unit setup clean

# torch is named first and alone: the CPU wheel is the pinned one, and no other request may pull a CUDA build.
$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

setup: $(VENV)/.done

run: setup
	$(BIN)/python -m distill.train $(RECIPE)
	$(BIN)/python -m eval.run $(RECIPE)

check: lint types contracts

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

contracts: setup
	$(BIN)/lint-imports

# A worker a core, one thread each; then what compares times, with nothing beside it.
unit: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "not alone"
	$(BIN)/pytest -m alone

test: check unit

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
