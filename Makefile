# Two commands on a fresh machine: `make demo` and `make test`. Everything they need is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Real data sets, used when they lie beside the project; the commands fall back to embedded data without them.
ifneq ($(wildcard ../shared/data),)
export EFLA_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test test-all test-browser test-sanitizers lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[experiments,eval,dev]'
	touch $(STAMP)

demo: setup
	$(BIN)/efla doctor
	$(BIN)/efla reproduce exactness --profile quick --output runs/demo-exactness
	EFLA_DATA= $(BIN)/efla reproduce smnist --profile quick --output runs/demo-smnist
	$(BIN)/efla report runs/demo-smnist runs/demo-exactness --output runs/demo-report.html

test: setup
	$(BIN)/python -m pytest -n 2 -m 'not slow and not browser' --durations=10

test-all: setup test-sanitizers
	$(BIN)/python -m pytest -n 2 --durations=20

# The report in headless Chromium (Debian: apt-get install chromium); skipped with the reason where there is none.
test-browser: setup
	$(BIN)/python -m pytest -m browser tests/report

# The C++ kernels on random shapes against a naive implementation, under the address and undefined-behaviour sanitizers.
test-sanitizers:
	cmake -S csrc -B build/sanitizers -DEFLA_BUILD_PYTHON=OFF -DEFLA_BUILD_FUZZ=ON -DEFLA_SANITIZE=ON
	cmake --build build/sanitizers --parallel 2
	build/sanitizers/efla_fuzz

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/efla bench models --output benchmarks/results/models.json
	$(BIN)/efla bench scan --output benchmarks/results/scan.json --plot docs/figures/cost_against_length.svg

docs: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site runs .mypy_cache .ruff_cache .hypothesis
