# Everything runs in one virtual environment, made on first use and renewed when its inputs change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_FLAGS ?=

.PHONY: demo test check format clean

demo: $(VENV)/.installed
	$(BIN)/auditor demo $(DEMO_FLAGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,check]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
