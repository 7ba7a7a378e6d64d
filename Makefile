# Everything a fresh checkout can do. `make help` lists it. Needs Python 3.11 or newer and nothing else.
# Variables: PYTHON (the interpreter to start from), ARGS (passed on: make demo ARGS="--model digits").

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Newer than what they depend on once the environment is ready, so that a second `make` installs nothing.
STAMP := $(VENV)/.ampkit-installed
DEMO_STAMP := $(VENV)/.ampkit-demo-installed
WORKERS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

.DEFAULT_GOAL := help
.PHONY: help install demo test quick lint format types kernels-check operators other-suites check soak bench docs wheel \
	wheel-check wheel-test matrix clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

$(STAMP): pyproject.toml constraints-dev.txt .ci/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" .ci/setup dev
	@touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints-dev.txt .ci/setup
	@PYTHON="$(PYTHON)" VENV="$(VENV)" .ci/setup demo
	@touch $@

install: $(STAMP) ## create .venv and install ampkit with its extras into it

demo: $(DEMO_STAMP) ## train on real data: fp32, torch.amp and ampkit side by side
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP) ## run every test; the ten longest are listed at the end
	@echo "==> tests, on $(WORKERS) workers"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 $(ARGS)

# The core, without what compiles, trains for long, starts processes or goes through thousands of cases.
QUICK := $(addprefix tests/, \
	policy/test_policy.py policy/test_op_table.py \
	dispatch/test_casting.py dispatch/test_handlers.py dispatch/test_weight_cache.py dispatch/test_self_check.py \
	region/test_autocast.py region/test_nested_regions.py region/test_module_rules.py \
	gradients scaler/test_grad_scaler.py scaler/test_loss_scale.py scaler/test_scaler_lockstep.py scaler/test_refusals.py \
	parity/test_bitwise_training.py benchmarks/test_counts.py repository/test_form.py repository/test_references.py)
quick: lint ## before a commit: lint and the tests of the core, under a minute on two cores
	@echo "==> tests of policies, regions, gradients and the scaler, on $(WORKERS) workers"
	@$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow" $(QUICK) $(ARGS)
	@echo "left out (make check runs it): types, kernels, optimizers, FP8, compiled code, ranks, half_precision, amp, debugging, integrations, stress, docs"

lint: $(STAMP) ## ruff: its rules and its format; the English of the pages
	@echo "==> lint and format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tests.tools.prose

format: $(STAMP) ## lay out every Python file with ruff's formatter
	@$(BIN)/ruff format .

types: $(STAMP) ## pyright
	@echo "==> types"
	@$(BIN)/pyright

kernels-check: $(STAMP) ## compile every Triton kernel for real GPUs (needs none) and look at the code
	@echo "==> kernels, compiled ahead of time"
	@env -u TRITON_INTERPRET $(BIN)/python -m tests.kernels.aot_check

operators: $(STAMP) ## compare the operator lists with the installed torch
	@$(BIN)/python -m pytest -q tests/policy/test_op_registry.py

other-suites: $(STAMP) ## other projects' precision tests with ampkit in torch's place: SOURCES=/folder with checkouts
	@test -n "$(SOURCES)" || { echo "make other-suites SOURCES=/folder: see tests/tools/other_suites.py"; exit 2; }
	@$(BIN)/python -m tests.tools.other_suites "$(SOURCES)"

check: lint types kernels-check test ## all of the above checks: what CI runs

# Each file of tests/stress is a harness and gets its share of the time.
SOAK_SECONDS ?= 3600
soak: $(STAMP) ## the fuzzers of tests/stress for an hour (SOAK_SECONDS), with a seed that they print
	@files=$$(ls tests/stress/test_*.py | wc -l); seconds=$$(($(SOAK_SECONDS) / files)); \
	seed=$${AMPKIT_SOAK_SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; \
	echo "==> soak: $$files harnesses, $$seconds s each, AMPKIT_SOAK_SEED=$$seed"; \
	AMPKIT_SOAK_SECONDS=$$seconds AMPKIT_SOAK_SEED=$$seed $(BIN)/python -m pytest -s -p no:xdist --timeout=0 tests/stress $(ARGS)

bench: $(STAMP) ## measure; see docs/performance.md
	@$(BIN)/python -m benchmarks $(ARGS)

DOCS_STAMP := $(VENV)/.ampkit-docs-installed
$(DOCS_STAMP): $(STAMP)
	@echo "==> installing what builds the documentation"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP) ## the documentation as a site in build/site; a broken link is an error
	@echo "==> docs"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html: read it with $(BIN)/python -m http.server --directory build/site"

wheel: $(STAMP) ## build the wheel, which holds both packages, and the source archive into dist/
	@echo "==> wheel"
	@rm -f dist/ampkit-*
	@$(BIN)/python -m hatchling build --directory dist

wheel-check: $(STAMP) ## check by twine what a package index would show of the files in dist/
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[release]'
	@$(BIN)/python -m twine check --strict dist/ampkit-*

wheel-test: $(STAMP) ## install the wheel, of dist/ if there is one, with the oldest and the newest torch and nothing else; train a step
	@$(BIN)/nox --envdir "$(ENVS)" --session wheel -- $(wildcard dist/ampkit-*.whl)

TORCH ?=
ENVS ?= .nox
matrix: $(STAMP) ## the whole suite under every supported torch, or one: make matrix TORCH=2.15.0 [ENVS=/folder]
	@$(BIN)/nox --envdir "$(ENVS)" $(if $(TORCH),--session "tests(torch='$(TORCH)')") -- $(ARGS)

clean: ## remove caches and outputs; .venv stays
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist ampkit-demo
	find ampkit kernels tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
