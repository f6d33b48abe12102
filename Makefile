# Needs Python 3.11 or newer and make; everything else goes into .venv, pinned by hash.
#
#   make up      start a name server (9876) and a broker (10911), messages in ./data
#   make demo    a broker, orders, and Spark that adds them up and archives them; needs Java 17
#   make test    everything: lint, types, unit tests, and Apache's own clients against Skylark
#   make help    the rest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup-done
# Told apart from the Python in .venv, which may be on the PATH.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	path=$$(command -v $$name 2>/dev/null) || continue; \
	"$$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$path"; break; }; done)
ARGS ?=

.PHONY: help setup compiled up demo test interop lint format unit bench lock clean

help: ## say what can be made
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(SETUP) ## create .venv with everything in it

$(SETUP): pyproject.toml requirements/dev.txt
	@if [ -z "$(PYTHON)" ]; then echo "make: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "make: $(PYTHON) cannot create a virtual environment; install its venv module (Debian: python3-venv)" >&2; exit 1; fi
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# It does nothing when they are compiled already, and says so when there is no C compiler.
compiled: $(SETUP) ## compile the modules that every message goes through
	@$(BIN)/python tools/compile.py

up: compiled ## start name server and broker; options in ARGS="--broker-port 0"
	@exec $(BIN)/skylark up $(ARGS)

demo: $(SETUP) ## broker, orders, a streaming aggregation and an archive on Spark; needs Java 17
	@exec $(BIN)/skylark demo $(ARGS)

# Two at once: most tests wait for servers and clients. Each of the two has servers of its own.
test: $(SETUP) ## everything that must pass
	$(MAKE) --no-print-directory --output-sync -j 3 lint compiled interop
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20 $(ARGS)
	SKYLARK_PURE=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/wire tests/net tests/selectors tests/store/test_store.py tests/store/test_reading.py tests/store/test_index.py

interop: $(SETUP) ## fetch Apache's clients and server for the tests that use them
	$(BIN)/python tools/interop_setup.py

lint: $(SETUP) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(SETUP) ## put the code into the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: compiled ## the fast tests, without Apache's parts and without Spark
	$(BIN)/python -m pytest $(addprefix --ignore=tests/,interop client/both spark pipelines faults) $(ARGS)

bench: compiled interop ## side by side with Apache RocketMQ; ARGS=--quick takes five minutes
	$(BIN)/python -m bench.suite $(ARGS)

lock: $(SETUP) ## choose dependency versions anew and write requirements/*.txt
	$(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	compile() { .cache/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate "$$@"; }; \
	compile pyproject.toml -o requirements/runtime.txt; \
	compile pyproject.toml requirements/build.in --extra dev -c requirements/runtime.txt -o requirements/dev.txt

clean: ## remove what was made, but not ./data
	find src -name '*.so' -delete
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
