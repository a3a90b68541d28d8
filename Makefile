# Two commands for a fresh machine: 'make demo' and 'make test'. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev

.PHONY: demo test test-fast fuzz check bench clean

demo: $(CORE)  ## set up, then compare LaS with its formula, and try a claim of the paper
	$(BIN)/longlens demo

test: $(DEV)  ## set up, then run all tests but the fuzz (under ten minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-fast: $(DEV)  ## the tests without kills, other processes, compilers, browsers and the zoo (under two minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not (fuzz or slow or faults or distributed or oracle or zoo or browser)"

fuzz: $(DEV)  ## random options, recipes, archives, stored sets and run folders (ten minutes at most)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m fuzz tests/fuzz

check: $(DEV)  ## lint, format, types, and the order of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(CORE)  ## the full attention benchmark (about forty minutes on two cores)
	mkdir -p figures
	$(BIN)/longlens bench attention --out figures/bench_attention.json

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'LongLens needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(DEV): $(CORE)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) figures demo page build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
