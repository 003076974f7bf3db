# Two commands on a fresh machine:   make demo   and   make test
# Everything happens in .venv; no system package is needed besides Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow faults lint clean

demo: $(INSTALLED)
	$(BIN)/stella demo

test: $(INSTALLED) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist worksteal

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -m slow

faults: $(INSTALLED)
	$(BIN)/python -m benchmarks.faults

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
