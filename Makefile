# Two commands on a fresh machine: `make run` (the demo study) and `make test` (what CI runs).
PYTHON ?= python3
BIN := .venv/bin
.PHONY: run test test-slow lint clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

run: .venv/ready
	$(BIN)/overnight run

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

test-slow: .venv/ready
	$(BIN)/pytest -m slow

clean:
	rm -rf .venv build *.egg-info
