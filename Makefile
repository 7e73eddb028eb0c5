# One word each, the same here and in CI. Everything is installed into .venv by `make setup`, which the others call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test check bench

setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"Python 3.11, 3.12 or 3.13 is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: setup
	$(BIN)/shardwright train recipes/quickstart.toml

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check src tests bench
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest --quiet tests/pure/test_house.py

bench: setup
	$(BIN)/python bench/step.py --short
