# Two commands for a fresh machine: 'make demo' and 'make test'. Everything is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core
DEV := $(VENV)/.dev

.PHONY: demo test check bench clean

demo: $(CORE)  ## set up, then train LaS, LaS-chunk and a Transformer on ListOps, and show who is ahead
	$(BIN)/longlens demo

test: $(DEV)  ## set up, then run the tests
	$(BIN)/python -m pytest

check: $(DEV)  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(CORE)  ## the full attention benchmark (about forty minutes on two cores)
	mkdir -p results
	$(BIN)/longlens bench attention --out results/bench_attention.json

$(CORE): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'LongLens needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e .
	touch $@

$(DEV): $(CORE)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) results build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
