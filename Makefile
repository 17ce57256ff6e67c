# Every target sets up .venv by itself. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Two busy thread pools on few cores crawl when they spin.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-slow check bench clean

# torch is installed first and alone, at its pinned version: no other package may then pull another build of it.
$(VENV)/user: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/dev: $(VENV)/user
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/user
	$(BIN)/vitkit demo

test: $(VENV)/dev
	$(BIN)/pytest -n 2 --durations=15

test-slow: $(VENV)/dev
	$(BIN)/pytest -m slow --durations=15

check: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info
