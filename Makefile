# Everything runs in one virtual environment, made on first use and renewed when its inputs change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_FLAGS ?=
# As many workers as cores; PYTEST_FLAGS="-n 0 --pdb" debugs in one process.
PYTEST_WORKERS := -n auto --dist worksteal

STACKS := accelerate fabric lightning mixes models mosaic ray transformers torchdata webdataset

.SECONDARY:
.PHONY: demo test test-stacks check format clean

demo: $(VENV)/.installed
	$(BIN)/auditor demo $(DEMO_FLAGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_FLAGS)

# Each framework in an environment of its own; what came out is kept.
test-stacks: $(STACKS:%=test-stack-%)

test-stack-%: .stacks/%/.installed
	mkdir -p reports/stacks
	.stacks/$*/bin/python -m pip list --format=freeze 2>/dev/null \
	  | grep -E "^(torch|accelerate|lightning|transformers|torchdata|webdataset|datasets|mosaicml-streaming|ray|ai2-olmo-core|litdata|megatron-core|megatron-energon)==" \
	  > reports/stacks/$*.txt
	.stacks/$*/bin/python -m pytest -q -W ignore $(PYTEST_FLAGS) $(wildcard tests/stacks/test_$*.py tests/stacks/test_$*_*.py) $(MORE_TESTS) \
	  >> reports/stacks/$*.txt; status=$$?; tail -n 3 reports/stacks/$*.txt; exit $$status

.stacks/%/.installed: pyproject.toml tests/stacks/requirements/%.txt
	$(PYTHON) -m venv .stacks/$*
	.stacks/$*/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(shell sed -n 's/^torch==//p' constraints.txt)"
	.stacks/$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[test]" -r tests/stacks/requirements/$*.txt
	for file in $(wildcard tests/stacks/requirements/$*.without-dependencies.txt); do \
	  .stacks/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $$file || exit 1; done
	touch $@

# The writers of mixes, each read back by the library that it writes for.
test-stack-mixes test-stack-mosaic: MORE_TESTS := tests/clean/test_mix_formats.py
test-stack-lightning: MORE_TESTS := tests/test_cli_proposing.py

# Its own requirements ask for a torchvision, for images alone, and for services nobody tests here.
test-stack-mosaic: export PYTHONPATH := tests/stacks/stand_ins

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,check,wandb,trackio]"
	touch $@

clean:
	rm -rf $(VENV) .stacks build dist *.egg-info
