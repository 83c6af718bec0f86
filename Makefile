# Every target prepares what it needs: `make test` is enough on a fresh machine with Python 3.11 or newer.

VENV ?= .venv
OLDEST ?= .venv-oldest
# Test processes, and more arguments for pytest: make test WORKERS=4 ARGS="-m slow"
WORKERS ?= 2
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install quickstart test test-oldest test-gpu coverage lint lint-style lint-format lint-types lint-imports format docs release-check release-checklist clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create the virtual environment and install the package with its development tools

# A python3.11 on the PATH may be a shim that cannot run, so candidates are run, not only looked up.
$(BIN)/python:
	@for python in python3.11 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Creating $(VENV) with $$python"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "Expected python3.11, or a python3 of version 3.11 or newer, on the PATH; found neither." >&2; \
	exit 1

# Order-only: the environment's python is a link whose date says nothing about the packages.
$(STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

# Replaces the quickstart's own folder, and no other: output= is part of the config.
quickstart: $(STAMP) ## Finetune a small model on digits against its dropout baseline (about a minute)
	$(BIN)/python -m solver_plugins.cli finetune configs/recipes/quickstart.yaml --overwrite

# One thread per process: the processes share the cores, and more threads only get in each other's way.
test: $(STAMP) ## Run the tests (WORKERS=2, ARGS="...")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# In an environment of its own; .ci/oldest.py reads the versions from pyproject.toml. Old libraries warn of themselves.
test-oldest: ## Run the tests with the oldest torch, timm, transformers, ... that pyproject.toml allows (ARGS="...")
	$(MAKE) $(OLDEST)/bin/python VENV=$(OLDEST)
	$(OLDEST)/bin/python .ci/oldest.py > $(OLDEST)/oldest.txt
	$(OLDEST)/bin/python -m pip install --constraint $(OLDEST)/oldest.txt --editable '.[dev]'
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n $(WORKERS) -W default $(ARGS)

test-gpu: $(STAMP) ## Run the tests that need a CUDA or MPS device (ARGS="...")
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

coverage: $(STAMP) ## Check every model of timm and transformers; takes hours, and continues where it stopped (WORKERS=2)
	$(BIN)/python -m tests.coverage.newcomer > /dev/null
	$(BIN)/python -m tests.coverage --transformers --workers $(WORKERS) --first-call runs/newcomer.jsonl --table docs/coverage.md $(ARGS)
	$(BIN)/python -m tests.coverage --timm --workers $(WORKERS) --table docs/coverage_timm.md $(ARGS)

lint: lint-style lint-format lint-types lint-imports ## Run all checks that need no tests

lint-style: $(STAMP) ## Check style (ruff)
	$(BIN)/ruff check .

lint-format: $(STAMP) ## Check formatting (ruff)
	$(BIN)/ruff format --check .

lint-types: $(STAMP) ## Check types (mypy)
	$(BIN)/mypy

lint-imports: $(STAMP) ## Check the import order of the packages (import-linter)
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code and sort imports
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(STAMP) ## Build the documentation site into site/; a broken link fails
	$(BIN)/python .ci/site.py

release-check: $(STAMP) ## Build sdist and wheel into dist/, and use the wheel in a fresh environment
	rm -rf dist
	$(BIN)/python .ci/release_check.py --output dist --tour
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

release-checklist: ## What to do for a release, in order
	@sed -n 's/^# release: //p' Makefile
# release: 1. pyproject.toml, CITATION.cff: the new version. CHANGELOG.md: its section has a date.
# release: 2. pyproject.toml: [project.urls] has Repository, Issues and Documentation of the public home. README.md: links
# release:    and the picture start with it, so that they work on the page of the package index, too.
# release: 3. git status is clean, and .ci/run passes (lint, site, tests); make test ARGS="-m slow" passes.
# release: 4. On a machine with a CUDA or MPS device: make test-gpu.
# release: 5. make release-check: sdist and wheel build, twine and check-wheel-contents find nothing,
# release:    and the wheel works and runs the tour in an environment of its own (with --with-dependencies: from the index).
# release: 6. git tag vX.Y.Z; upload dist/* with twine; publish site/ of make docs.
# release: 7. pip install solver-plugins==X.Y.Z in a fresh environment; solver-plugins env; the tour runs.
# release: 8. CHANGELOG.md: a new section "Unreleased".

clean: ## Remove caches and build products (keeps the virtual environment)
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find solver_plugins tests -type d -name __pycache__ -prune -exec rm -rf {} +
