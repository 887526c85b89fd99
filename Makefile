# Two commands are enough: `make up` serves, `make test` checks. Each sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help up test test-vllm test-peer test-docker wheels check format vllm-env peer-env sim soak bench clean

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*?## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; assert v >= (3, 11), f"Multiplane needs Python 3.11 or newer, this is {sys.version.split()[0]}; set PYTHON=/path/to/python3.11"'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(BIN)/python
	@echo "Installing Multiplane into $(VENV) (once) …"
	@$(INSTALL) -e '.[embedded]' >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "Installing Multiplane and what its tests need into $(VENV) (once) …"
	@$(INSTALL) -e '.[dev]' >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }
	@touch $(VENV)/.run $@

up: $(VENV)/.run ## Start a whole plane here: NATS, emulated engines, sidecars, routers. ARGS="--help" lists what it can do.
	@$(BIN)/multiplane up $(ARGS)

test: $(VENV)/.dev ## Run every test that needs nothing but this machine. ARGS="tests/core -k index" narrows it.
	@$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not vllm and not peer and not docker" $(ARGS)

test-vllm: $(VENV)/.dev ## Run the tests against real vLLM on this CPU (builds its environment once: about 3 minutes).
	@MULTIPLANE_VLLM_PYTHON=$$($(BIN)/python tests/vllm_env/build.py) && export MULTIPLANE_VLLM_PYTHON && $(PYTEST) -m vllm $(ARGS)

test-peer: peer-env ## Compare the lab's replays with those of NVIDIA Dynamo's replayer (builds its environment once).
	@$(PYTEST) -m peer $(ARGS)

vllm-env: ## Build the environment with real vLLM for the CPU, and print its interpreter.
	@$(PYTHON) tests/vllm_env/build.py

peer-env: $(VENV)/.dev ## Build the environment with the peer's replayer, and print its interpreter.
	@$(BIN)/python -m bench.dynamo_env

test-docker: $(VENV)/.dev wheels ## Run the tests on a Docker engine, which is installed and started if none answers (root).
	@.ci/docker sh -ec '$(BIN)/python -m tests.deploy.base_images && $(PYTEST) -m docker $(ARGS)'

wheels: $(VENV)/.dev ## Gather what the images install in deploy/wheels, for builds without a package index.
	@$(BIN)/python -m pip download -q --disable-pip-version-check --dest deploy/wheels --no-deps \
		--only-binary=:all: --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--require-hashes $(patsubst %,-r %,$(wildcard deploy/requirements*.lock))
	@$(BIN)/python -m pip download -q --disable-pip-version-check --dest deploy/wheels --no-deps 'setuptools>=77'

sim: $(VENV)/.dev ## Run the simulated world once. SEED=7 repeats that run.
	@$(BIN)/python -m tests.sim.run --seed $(or $(SEED),$(shell date +%s)) $(ARGS)

soak: $(VENV)/.dev ## 100,000 mixed requests with aborts and failing engines; fails if anything grew. ARGS="--queue" lets them wait, too; "--requests 5000" shortens it.
	@$(BIN)/python -m bench.soak $(ARGS)

bench: $(VENV)/.dev ## Compare with peers in one run. OF=proxy, decision, tokens, memory or bus; ARGS="--json".
	@$(BIN)/python -m bench.$(or $(OF),proxy) $(ARGS)

check: $(VENV)/.dev ## Formatting, lint and types, as CI runs them.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/.dev ## Put the formatting right.
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean: ## Remove everything that these targets made here.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
