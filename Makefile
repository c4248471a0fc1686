# Every command of this project; `make` alone lists them. Each sets up what it needs.
#   make PYTHON=python3.12 ...   another Python     make VENV=folder ...   another environment

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MODEL ?=
MATRIX ?=
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest -n 2 --dist worksteal
# mypy and import-linter do not see through an editable install, so they read the three rooms
# under their import names from links.
ROOMS := build/rooms

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-gpu test-matrix bench-cpu bench-gpu lint docs clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup:  ## make the environment; quick when it is already there
	@test -n "$(PYTHON)" || { echo "setup: error: no python3.11 and no python3 found; install one or use make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) tools/setup.py --venv $(VENV)

demo: setup  ## serve a small model in 16 and 4 bits and compare; MODEL=owner/name for another
	@$(BIN)/python -m demo.run $(MODEL)

test: lint  ## everything: lint, types, import layers, generated docs, all tests
	@$(PYTEST)

test-fast: setup  ## the quick tests: no engine, no GPU; under a minute
	@$(PYTEST) -m "not engine and not gpu and not slow"

test-gpu: setup  ## the tests that need a GPU
	@$(BIN)/pytest tests/gpu

test-matrix:  ## engine tests on every supported vLLM and bitsandbytes; MATRIX="--vllm 0.28.0" for one
	@$(PYTHON) -m tools.matrix $(MATRIX)

bench-cpu: setup  ## speed on this CPU beside 16-bit and vllm-bnb-plugin; half an hour
	@$(BIN)/python -m pip install --quiet matplotlib
	@$(BIN)/python -m benchmarks.engine --eager --served 16-bit plugin-nf4 nf4 nf4-in-flight int8 \
		--batches 1 8 --tokens 64 --prefill 512
	@$(BIN)/python -m benchmarks.engine --eager --served 16-bit plugin-nf4 nf4 int8 \
		--shape llama-1b --batches 1 8 --tokens 16 --prefill 256

bench-gpu: setup  ## speed on this GPU: layers, experts, and an 8B model beside its rivals
	@$(BIN)/python -m pip install --quiet matplotlib
	@$(BIN)/python -m benchmarks.gemm
	@$(BIN)/python -m benchmarks.experts
	@$(BIN)/python -m benchmarks.engine --shape llama-8b --batches 1 4 16 64 256 --prompts 8

lint: setup  ## code style, types, import layers, generated docs
	@echo "lint: ruff" && $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@mkdir -p $(ROOMS) && for room in oot_quant:oot_quant backends:oot_quant_backends cli:oot_quant_cli; do \
		ln -sfn "$(CURDIR)/$${room%%:*}" "$(ROOMS)/$${room##*:}"; done
	@echo "lint: mypy, minutes when its cache is cold" && MYPYPATH=$(ROOMS) $(BIN)/mypy
	@echo "lint: import layers" && PYTHONPATH=$(ROOMS) $(BIN)/lint-imports --no-logo
	@echo "lint: generated docs" && $(BIN)/cog --check --check-fail-msg "run: make docs" README.md docs/*.md

docs: setup  ## write the generated parts of README.md and docs/ anew
	@$(BIN)/cog -r README.md docs/*.md

clean:  ## remove the environment, the models and all caches
	rm -rf $(VENV) build models .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
