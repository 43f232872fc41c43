# `make demo` and `make test` set themselves up: all they need is Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
TEST_VENV := .venv-test
EVAL_VENV := .venv-eval
LMMS_VENV := .venv-lmms
VLLM_VENV := .venv-vllm
PEERS_VENVS := .venv-peers
SGLANG_VENV := .venv-sglang
RAY_VENV := .venv-ray
LOCK_VENV := .venv-lock
FUZZ_VENV := .venv-fuzz
RELEASE_VENV := .venv-release
WHEEL_VENV := .venv-wheel
LOWEST_VENV := .venv-lowest
DEMO_OUTPUT := demo-output
# What is imported is compiled then, and only then: all of torch and transformers would take minutes.
# Kept, too, whatever the environment says: thousands of processes import the same.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := pip install --quiet --disable-pip-version-check --no-compile
# Exact versions with hashes, and all that is needed: nothing else is resolved or installed. torch is
# installed before them, by version only, because its build depends on the machine.
INSTALL_LOCKED := $(INSTALL) --no-deps --require-hashes --requirement tests/requirements/
TORCH := "torch==2.13.0"

.PHONY: demo test test-all left-out test-oracle test-eval test-engines test-vllm test-ray test-wheel \
	test-lowest lint types docs format lock dist bench bench-peers torture torture-fuzz torture-eval \
	clean

# venv would make an environment that cannot install the project, and pip says so at length.
define NEED_PYTHON
import sys
if sys.version_info < (3, 11):
    sys.exit("error: unshard needs Python 3.11 or later; name one: make PYTHON=python3.12 ...")
endef
export NEED_PYTHON

# The demonstration has an environment of its own, without torch.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c "$$NEED_PYTHON"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/$(INSTALL) -e .
	touch $@

# torch first and by exact version: a CPU build, and nothing that follows may replace it. vLLM, which
# sees these packages, would load ModelExpress as a plugin, without what that needs.
$(TEST_VENV)/.installed: pyproject.toml tests/requirements/test.txt tests/requirements/trainers.txt
	@$(PYTHON) -c "$$NEED_PYTHON"
	$(PYTHON) -m venv $(TEST_VENV)
	$(TEST_VENV)/bin/$(INSTALL) $(TORCH)
	$(TEST_VENV)/bin/$(INSTALL_LOCKED)test.txt
	$(TEST_VENV)/bin/$(INSTALL_LOCKED)trainers.txt
	rm -f `$(TEST_VENV)/bin/python $(PACKAGES)`/modelexpress-*.dist-info/entry_points.txt
	$(TEST_VENV)/bin/$(INSTALL) --no-deps -e .
	touch $@

# An environment that sees the packages of others, which come after its own in its path.
PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
define ON
	$(PYTHON) -m venv $(1)
	(for one in $(2); do $$one/bin/python $(PACKAGES); done; echo $(CURDIR)/src) \
		> `$(1)/bin/python $(PACKAGES)`/seen.pth
endef

# Evaluators, trackers, a browser, the documentation. lm-eval and lmms-eval read the definitions of
# all their tasks whenever they start: 16,000 files, of which tests use none.
$(EVAL_VENV)/.installed: $(TEST_VENV)/.installed tests/requirements/eval.txt
	$(call ON,$(EVAL_VENV),$(TEST_VENV))
	$(EVAL_VENV)/bin/$(INSTALL_LOCKED)eval.txt
	find $(EVAL_VENV)/lib/python3*/site-packages/lm_eval/tasks -name '*.yaml' -delete
	touch $@

$(LMMS_VENV)/.installed: $(EVAL_VENV)/.installed tests/requirements/lmms.txt
	$(call ON,$(LMMS_VENV),$(EVAL_VENV) $(TEST_VENV))
	$(LMMS_VENV)/bin/$(INSTALL_LOCKED)lmms.txt
	find $(LMMS_VENV)/lib/python3*/site-packages/lmms_eval/tasks -name '*.yaml' -delete
	touch $@

# vLLM asks for other versions of transformers and a few more.
$(VLLM_VENV)/.installed: $(EVAL_VENV)/.installed tests/requirements/vllm.txt
	$(call ON,$(VLLM_VENV),$(EVAL_VENV) $(TEST_VENV))
	$(VLLM_VENV)/bin/$(INSTALL_LOCKED)vllm.txt
	touch $@

# torchvision is a CUDA build, whose operators do not load: nothing may be registered for them then.
$(SGLANG_VENV)/.installed: $(VLLM_VENV)/.installed tests/requirements/sglang.txt
	$(call ON,$(SGLANG_VENV),$(VLLM_VENV) $(EVAL_VENV) $(TEST_VENV))
	$(SGLANG_VENV)/bin/$(INSTALL_LOCKED)sglang.txt
	: > `$(SGLANG_VENV)/bin/python $(PACKAGES)`/torchvision/_meta_registrations.py
	touch $@

# Ray, and verl's checkpoint manager, which needs Ray.
$(RAY_VENV)/.installed: $(EVAL_VENV)/.installed tests/requirements/ray.txt \
		tests/requirements/verl.txt
	$(call ON,$(RAY_VENV),$(EVAL_VENV) $(TEST_VENV))
	$(RAY_VENV)/bin/$(INSTALL_LOCKED)ray.txt
	$(RAY_VENV)/bin/$(INSTALL_LOCKED)verl.txt
	touch $@

# The fuzzer.
$(FUZZ_VENV)/.installed: $(TEST_VENV)/.installed tests/requirements/fuzz.txt
	$(call ON,$(FUZZ_VENV),$(TEST_VENV))
	$(FUZZ_VENV)/bin/$(INSTALL_LOCKED)fuzz.txt
	touch $@

# The tools that build and check a release. The build backend is among them, by exact version: the
# same tree gives the same bytes.
$(RELEASE_VENV)/.installed: tests/requirements/release.txt
	@$(PYTHON) -c "$$NEED_PYTHON"
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/$(INSTALL_LOCKED)release.txt
	touch $@

# The lowest versions that pyproject.toml allows, and the newest of what those need themselves.
# torch and the tools of the tests are those of `make test`.
$(LOWEST_VENV)/.installed: pyproject.toml tools/lowest.py
	@$(PYTHON) -c "$$NEED_PYTHON"
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/$(INSTALL) $(TORCH) `$(PYTHON) tools/lowest.py`
	$(LOWEST_VENV)/bin/$(INSTALL) --no-deps -e .
	touch $@

# After a change of versions in pyproject.toml or tests/requirements/*.in.
lock:
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/$(INSTALL) uv==0.13.9
	$(LOCK_VENV)/bin/python tools/lock.py

demo: $(VENV)/.installed
	@rm -rf $(DEMO_OUTPUT)
	@VENV=$(VENV) OUTPUT=$(DEMO_OUTPUT) sh examples/demo.sh

# Each run leaves a report in build/results, and tools/sums.py adds them up.
PYTEST = -m pytest -n $(WORKERS) --dist loadgroup --junitxml build/results/$@.xml
WORKERS ?= 4

# For people: what is quick, with 50 examples of each property. ROOM=read is one folder of tests.
# `make types` checks more: here packages are missing whose types it would compare.
QUICK_TYPES := --num-workers 2 src tests --exclude '^tests/evaluators/' --ignore-missing-imports \
	--no-warn-unused-ignores --no-warn-return-any
test: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(if $(ROOM),,$(TEST_VENV)/bin/mypy $(QUICK_TYPES))
	$(TEST_VENV)/bin/python $(PYTEST) tests/$(ROOM) --ignore tests/evaluators \
		-m "not slow and not evaluators and not vllm and not ray" --hypothesis-profile quick

# Everything: what `make test` runs, and in one run what it leaves out, with all examples.
test-all: test types docs demo test-wheel left-out

LEFT_OUT := slow or hypothesis or evaluators
LMMS_PYTHON := UNSHARD_LMMS_EVAL_PYTHON=$(CURDIR)/$(LMMS_VENV)/bin/python
VLLM_PYTHONS := UNSHARD_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python \
	UNSHARD_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python
RAY_PYTHONS := UNSHARD_RAY_PYTHON=$(CURDIR)/$(RAY_VENV)/bin/python \
	UNSHARD_VERL_PYTHON=$(CURDIR)/$(RAY_VENV)/bin/python
left-out: $(EVAL_VENV)/.installed $(LMMS_VENV)/.installed $(VLLM_VENV)/.installed \
		$(SGLANG_VENV)/.installed $(RAY_VENV)/.installed
	$(LMMS_PYTHON) $(VLLM_PYTHONS) $(RAY_PYTHONS) $(EVAL_VENV)/bin/python $(PYTEST) \
		-m "$(LEFT_OUT) or vllm or ray"

# Parts of it, by environment.
test-oracle: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python $(PYTEST) --ignore tests/evaluation --ignore tests/evaluators \
		-m "($(LEFT_OUT)) and not vllm and not ray"

test-eval: $(EVAL_VENV)/.installed $(LMMS_VENV)/.installed
	$(LMMS_PYTHON) $(EVAL_VENV)/bin/python $(PYTEST) tests/evaluation tests/evaluators \
		-m "($(LEFT_OUT)) and not vllm and not ray"

test-engines: test-vllm test-ray

test-vllm: $(EVAL_VENV)/.installed $(VLLM_VENV)/.installed $(SGLANG_VENV)/.installed
	$(VLLM_PYTHONS) $(EVAL_VENV)/bin/python $(PYTEST) -m vllm

test-ray: $(EVAL_VENV)/.installed $(RAY_VENV)/.installed
	$(RAY_PYTHONS) $(EVAL_VENV)/bin/python $(PYTEST) -m ray

# The files of a release, checked, and their bill of materials: docs/releasing.md. The wheel is built
# from the sdist, so nothing that it needs is missing there.
dist: $(RELEASE_VENV)/.installed
	rm -rf dist build/sbom
	mkdir -p build/sbom
	$(RELEASE_VENV)/bin/python -m build --no-isolation
	$(RELEASE_VENV)/bin/twine check --strict dist/*
	$(RELEASE_VENV)/bin/check-wheel-contents dist/*.whl
	$(RELEASE_VENV)/bin/python tools/sbom.py dist/*.whl > build/sbom/`basename dist/*.whl`.cdx.json

# A new wheel, or WHEEL=dist/*.whl, in an environment that has only what it asks for.
test-wheel: $(if $(WHEEL),,dist)
	rm -rf $(WHEEL_VENV)
	$(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/$(INSTALL) "`echo $(or $(WHEEL),dist/*.whl)`[eval,serve]"
	$(WHEEL_VENV)/bin/python -I tests/wheel_alone.py

# The tests of all that uses a dependency, with the lowest version of each. Old versions warn where
# their own dependencies are newer. The stand-in of the hub does not know how huggingface_hub 0 reads
# hf://, and numpy 1 takes its own booleans as an index.
LOWEST_TESTS := tensors cli/test_cli.py test_console.py read/test_dcp_metadata.py read/test_inflate.py \
	write/test_execute.py write/test_hub.py write/test_verify_load.py stores/test_copying.py \
	stores/test_clouds.py stores/test_other_stores.py evaluation/test_client.py \
	evaluation/test_eval_cli.py evaluation/server/test_app.py evaluation/server/test_page.py \
	evaluation/server/test_server_v1.py evaluation/server/test_store.py \
	evaluation/server/test_schema.py evaluation/server/test_validation.py \
	evaluation/server/test_metrics.py evaluators/test_prometheus.py
test-lowest: $(LOWEST_VENV)/.installed
	$(LOWEST_VENV)/bin/python $(PYTEST) $(addprefix tests/,$(LOWEST_TESTS)) -W default \
		--hypothesis-profile quick -m "not slow and not vllm and not ray" \
		-k "not repository_of_the_hub_is_read and not is_not_a_basic_index"

lint: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .

# All of it, which needs the types of all packages.
types: $(EVAL_VENV)/.installed
	$(EVAL_VENV)/bin/python -m mypy

# Strict: a link that leads nowhere fails, and so does a docstring that does not fit its function.
docs: $(EVAL_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(EVAL_VENV)/bin/mkdocs build

format: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check --fix .
	$(TEST_VENV)/bin/ruff format .

bench: $(EVAL_VENV)/.installed
	$(EVAL_VENV)/bin/python benchmarks/merge_against_cat.py
	$(EVAL_VENV)/bin/python benchmarks/from_pretrained_against_merge.py
	$(EVAL_VENV)/bin/python benchmarks/trainer_step.py
	$(EVAL_VENV)/bin/python benchmarks/submissions.py
	$(EVAL_VENV)/bin/python benchmarks/page.py
	$(EVAL_VENV)/bin/python benchmarks/long_run.py
	$(EVAL_VENV)/bin/python benchmarks/planning.py --directory build/planning

# Other tools merge the same checkpoints, each in an environment of its own: 5 GB of packages. The
# largest checkpoint and its truth need 25 GB in build/peers. PEERS="cells --size 0.5b --rounds 1"
# measures less.
PEERS ?=
bench-peers: export PYTHONPATH := $(CURDIR)/benchmarks
bench-peers: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python -m peers $(PEERS)

# Every attack, thousands of damaged checkpoints of every format, every call of the system that fails
# in every way, and 334 kills; docs/security.md has the figures. Hours on two idle cores.
torture: $(TEST_VENV)/.installed
	UNSHARD_ATTACKS_STRIDE=1 UNSHARD_MUTATIONS=600 UNSHARD_FAULTS=0 UNSHARD_KILLS=30 \
		$(TEST_VENV)/bin/python -u -m pytest -s --timeout 0 tests/oracle/test_attacks.py \
		tests/oracle/test_mutations.py tests/hostile/test_failing_calls.py \
		tests/hostile/test_pushes.py

# Every parser, guided by coverage. FUZZ="200000 600": inputs and seconds for each.
FUZZ ?= 100000 300
torture-fuzz: export PYTHONPATH := $(CURDIR)/tests
torture-fuzz: $(FUZZ_VENV)/.installed
	$(FUZZ_VENV)/bin/python -m hostile.campaign $(FUZZ)

# A real server and its processes, killed at random moments; then the tests of what once went wrong
# only now and then, again and again with busy loops next to them. Half an hour on two idle cores.
TORTURE ?=
STORMS ?=
REPEATED := tests/evaluation/server/test_adoption.py::test_a_server_killed_again_and_again_runs_every_job_once_at_a_time \
	tests/evaluation/server/test_adoption.py::test_a_supervisor_that_never_got_its_order_is_not_a_failure \
	tests/evaluation/server/test_adoption.py::test_a_stop_of_the_whole_service_while_an_evaluator_starts_fails_nothing \
	tests/evaluation/server/test_supervise.py::test_a_signal_before_the_order_ends_it_as_stopped_and_nothing_is_run
torture-eval: export PYTHONPATH := $(CURDIR)/tests
torture-eval: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python -m evaluation.torture $(TORTURE)
	$(TEST_VENV)/bin/python -m evaluation.storms $(STORMS)
	$(TEST_VENV)/bin/python -m pytest --timeout 0 -p evaluation.repetition --times 200 --busy 4 -n 4 $(REPEATED)

clean:
	rm -rf $(VENV) $(TEST_VENV) $(EVAL_VENV) $(LMMS_VENV) $(VLLM_VENV) $(SGLANG_VENV) $(RAY_VENV) $(LOCK_VENV) $(FUZZ_VENV) $(PEERS_VENVS) \
		$(RELEASE_VENV) $(WHEEL_VENV) $(LOWEST_VENV) dist $(DEMO_OUTPUT) .pytest_cache .mypy_cache .ruff_cache
