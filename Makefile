# Every target creates .venv on first use. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Thread pools that spin while waiting slow each other down on a few cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test test-slow check docs book dist bench clean

# Install torch first and on its own, at its pinned version, so that no other package pulls in another build.
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

# Each of the two processes takes one half of the files, so that few fixtures are made twice, and then what the other has left.
test: $(VENV)/dev
	$(BIN)/pytest -n 2 --dist worksteal --durations=15

test-slow: $(VENV)/dev
	$(BIN)/pytest -m slow --durations=15

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

# Build the site into build/site: executes the book's notebooks, which takes minutes.
docs: $(VENV)/dev
	$(BIN)/python -m docs.site.build

# Run the chapters of the book and write them as Markdown with their pictures into build/book.
book: $(VENV)/dev
	$(BIN)/python book/build.py build/book

# Build the wheel and the source archive into dist/.
dist: $(VENV)/dev
	$(BIN)/pip install -q build
	$(BIN)/python -m build

bench: $(VENV)/dev
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
