# Needs Python 3.11 or newer and make; everything else goes into .venv, pinned by hash.
#
#   make up        start a name server (9876) and a broker (10911), messages in ./data
#   make demo      a broker, orders, and Spark that adds them up and archives them; needs Java 17
#   make unit      the fast tests
#   make test      everything about Skylark: lint, types, and all tests with real clients, servers and Spark
#   make test-all  also what tells about Apache's server and about the older Spark
#   make help      the rest

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# What is installed: for a broker; with Spark; with the tests and checks. Each has what the one before has.
UP := $(VENV)/.up-done
DEMO := $(VENV)/.demo-done
DEV := $(VENV)/.dev-done
OLDER_SPARK := .cache/older-spark
# Told apart from the Python in .venv, which may be on the PATH.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	path=$$(command -v $$name 2>/dev/null) || continue; \
	"$$path" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$path"; break; }; done)
ARGS ?=

.PHONY: help setup compiled up demo unit test test-all beyond power-cuts soak interop lint format bench lock clean

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(DEV) ## create .venv with everything in it

$(VENV)/.%-done: pyproject.toml requirements/%.txt
	@if [ -z "$(PYTHON)" ]; then echo "make: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@if ! "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "make: $(PYTHON) cannot create a virtual environment; install its venv module (Debian: python3-venv)" >&2; exit 1; fi
	@"$(PYTHON)" tools/setup.py $*

# It does nothing when they are compiled already, and says so when there is no C compiler.
compiled: $(UP) ## compile the modules that every message goes through
	@$(BIN)/python tools/compile.py

# The first start does not wait for the compiler: it runs the sources, and the next one what was compiled meanwhile.
up: $(UP) ## start name server and broker; options in ARGS="--broker-port 0"
	@SKYLARK_COMPILING=$$($(BIN)/python tools/compile.py --beside) exec $(BIN)/skylark up $(ARGS)

demo: $(DEMO) ## broker, orders, a streaming aggregation and an archive on Spark; needs Java 17
	@exec $(BIN)/skylark demo $(ARGS)

# Most tests wait for servers and clients, so there are more at once than cores. Each worker has servers of its own.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
NOT_UNIT := interop client/both spark pipelines faults bench/test_load.py test_install.py \
	$(addprefix cli/test_,command.py edges.py fleet.py messages.py pipeline.py ready_made.py report.py sending.py)
# The compiled modules, tested as sources.
PURE := wire net selectors store/test_store.py store/test_reading.py store/test_index.py

unit: $(DEV) compiled ## the fast tests, without Apache's parts and without Spark
	$(PYTEST) $(addprefix --ignore=tests/,$(NOT_UNIT)) $(ARGS)

test: $(DEV) ## everything about Skylark: lint, types, and all tests with real clients, servers and Spark
	$(MAKE) --no-print-directory --output-sync -j 3 lint compiled interop
	$(PYTEST) -m "not apache" --durations 20 $(ARGS)
	SKYLARK_PURE=1 $(PYTEST) $(addprefix tests/,$(PURE))

test-all: test beyond ## also what tells about Apache's server and about the older Spark, and longer kills

# What test-all has beyond test. Apache's server must pass what Skylark's does: that shows that the tests ask for
# Apache's behaviour and not for ours. The models of the sink and of streams run without Spark, the older one too.
beyond: $(DEV) $(OLDER_SPARK)/.done compiled interop
	SKYLARK_KILLS=12 SKYLARK_ARCHIVE_KILLS=3 SKYLARK_PIPELINE_KILLS=2 $(PYTEST) tests/pipelines tests/spark tests/client/both \
		tests/faults/test_kill.py -m "apache or kills" --durations 10 $(ARGS)
	$(PYTEST) tests/interop --server apache --durations 10 $(ARGS)
	PYTHONPATH=$(CURDIR)/$(OLDER_SPARK) $(PYTEST) tests/spark --ignore-glob '*_model.py' -m "not apache" --durations 10 $(ARGS)

$(OLDER_SPARK)/.done: requirements/older-spark.txt $(DEV)
	@echo "setup: the older Spark goes into $(OLDER_SPARK), about 450 MB to fetch" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes \
		--upgrade --target $(OLDER_SPARK) -r requirements/older-spark.txt
	@touch $@

# In several processes, since what a store had open when its power was cut stays open.
power-cuts: $(DEV) compiled ## cut the power of stores and brokers 10,000 times, which takes some minutes
	for seed in 0 1000 2000 3000; do \
		SKYLARK_POWER_CUTS=1250 SKYLARK_POWER_SEED=$$seed $(BIN)/python -m pytest -n 0 $(wildcard tests/faults/test_*power_cuts.py) $(ARGS); done

soak: $(DEV) compiled ## let members of all kinds come and go for an hour while brokers and name servers move
	SKYLARK_SOAK_S=$${SKYLARK_SOAK_S:-3600} $(BIN)/python -m pytest -n 0 tests/faults/test_client_soak.py $(ARGS)

interop: $(DEV) ## fetch Apache's clients and server for the tests that use them
	$(BIN)/python tools/interop_setup.py

lint: $(DEV) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV) ## put the code into the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: compiled interop ## side by side with Apache RocketMQ; ARGS=--quick takes five minutes
	$(BIN)/python -m bench.suite $(ARGS)

lock: $(DEV) ## choose dependency versions anew and write requirements/*.txt
	$(PYTHON) -m venv .cache/lock
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	compile() { .cache/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate "$$@"; }; \
	compile pyproject.toml requirements/build.in --extra dev -o requirements/dev.txt; \
	compile pyproject.toml requirements/build.in --extra spark -c requirements/dev.txt -o requirements/demo.txt; \
	compile pyproject.toml requirements/build.in -c requirements/dev.txt -o requirements/up.txt; \
	compile --no-deps requirements/older-spark.in -o requirements/older-spark.txt

clean: ## remove what was made, but not ./data
	find src -name '*.so' -delete
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
