# Two commands on a fresh machine: `make demo` and `make test`. Everything they need is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real data sets, used when they lie beside the project; the commands fall back to embedded data without them.
ifneq ($(wildcard ../shared/data),)
export EFLA_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test test-all lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[experiments,dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/efla doctor
	$(BIN)/efla reproduce exactness --profile quick --output runs/demo

test: setup
	$(BIN)/python -m pytest -n 2 -m 'not slow' --durations=10

test-all: setup
	$(BIN)/python -m pytest -n 2 --durations=20

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/efla bench

docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site runs .mypy_cache .ruff_cache .hypothesis
