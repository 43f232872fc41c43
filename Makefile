# `make demo` and `make test` set themselves up: all they need is Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
TEST_VENV := .venv-test
LMMS_VENV := .venv-lmms
LMMS_NEEDS := accelerate==1.15.0 datasets==5.2.0 evaluate==0.4.6 fastapi==0.165.0 httpx==0.28.1 \
	loguru==0.7.3 pillow==13.0.0 pytablewriter==1.2.1 pytz==2026.6 pyyaml==6.0.3 sacrebleu==2.6.0 tenacity==9.2.1 \
	transformers==5.23.0 uvicorn==0.54.0
DEMO_OUTPUT := demo-output
# Trainers that callbacks are written for; what they depend on would replace torch or take gigabytes.
WITHOUT_DEPENDENCIES := lightning==2.6.1 lightning-utilities==0.15.3 torchmetrics==1.9.0 \
	lmms-engine==0.1.4 loguru==0.7.3

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
	$(TEST_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(WITHOUT_DEPENDENCIES)
	touch $@

# lmms-eval has an environment of its own. What it asks for is far more than its command line needs
# for a model without weights, and a torchvision for another torch would break it.
$(LMMS_VENV)/.installed: Makefile
	$(PYTHON) -m venv $(LMMS_VENV)
	$(LMMS_VENV)/bin/pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(LMMS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps "lmms_eval==0.7.3"
	$(LMMS_VENV)/bin/pip install --quiet --disable-pip-version-check $(LMMS_NEEDS)
	touch $@

demo: $(VENV)/.installed
	@rm -rf $(DEMO_OUTPUT)
	@VENV=$(VENV) OUTPUT=$(DEMO_OUTPUT) sh examples/demo.sh

test: lint demo $(LMMS_VENV)/.installed
	UNSHARD_LMMS_EVAL_PYTHON=$(CURDIR)/$(LMMS_VENV)/bin/python $(TEST_VENV)/bin/python -m pytest -n 3 --dist loadgroup

lint: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/mypy

format: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check --fix .
	$(TEST_VENV)/bin/ruff format .

bench: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python benchmarks/merge_against_cat.py
	$(TEST_VENV)/bin/python benchmarks/trainer_step.py

clean:
	rm -rf $(VENV) $(TEST_VENV) $(LMMS_VENV) $(DEMO_OUTPUT) .pytest_cache .mypy_cache .ruff_cache
