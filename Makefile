# Two commands on a fresh machine: `make demo` and `make test`. Each sets up its own environment first.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin
OUT ?= out
# Tests run one process a core, each with one thread: many small tensors, so threads only get in the way.
WORKERS ?= auto

.PHONY: demo test lint docs clean

demo: $(VENV)/.ready
	$(BIN)/robust-attention demo --out $(OUT)/demo

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Material for MkDocs announces MkDocs 2 at every build; this project stays below it.
docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean --site-dir $(abspath $(OUT))/site

$(VENV)/.ready: pyproject.toml constraints.txt tools/setup
	PYTHON=$(PYTHON) tools/setup $(VENV)

clean:
	rm -rf $(VENV) $(OUT) build dist
