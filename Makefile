# `make demo` and `make test` set themselves up: all they need is Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
TEST_VENV := .venv-test
DEMO_OUTPUT := demo-output

.PHONY: demo test lint format bench clean

# The demonstration has an environment of its own, without torch.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -e .
	touch $@

# torch first and by exact version: a CPU build, and nothing that follows may replace it.
$(TEST_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TEST_VENV)
	$(TEST_VENV)/bin/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(TEST_VENV)/bin/pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@

demo: $(VENV)/.installed
	@rm -rf $(DEMO_OUTPUT)
	@VENV=$(VENV) OUTPUT=$(DEMO_OUTPUT) sh examples/demo.sh

test: lint demo
	$(TEST_VENV)/bin/python -m pytest -n 2 --dist loadgroup

lint: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/mypy

format: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check --fix .
	$(TEST_VENV)/bin/ruff format .

bench: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python benchmarks/merge_against_cat.py

clean:
	rm -rf $(VENV) $(TEST_VENV) $(DEMO_OUTPUT) .pytest_cache .mypy_cache .ruff_cache
