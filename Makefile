# Every command of the project. Bare `make` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete

.PHONY: help setup fast pure demo databases test spark-large check interop crash sim soak bench bench-growth bench-peers bench-client bench-kinds bench-spark docs lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with everything installed

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo "Python's venv module is missing: install the package python3-venv"; exit 1; fi; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fast,dev]'
	@# Compiled here and now, so that starts are quick even where Python may not write bytecode.
	$(PY) -m compileall -q src
	@touch $(STAMP)

fast: $(STAMP) ## compile the hot path again after a change of src/cometmq/_fast
	$(PY) setup.py -q build_ext --inplace

pure: ## remove the compiled path; everything runs on the plain one
	rm -f src/cometmq/_fast/*.so

demo: $(STAMP) ## the main job on an embedded server, step by step; ends by itself
	$(PY) examples/demo.py

# Servers for the tests of outbox and idempotence: installed where that is allowed, never started
# here. Without them those tests are skipped by name.
databases:
	@missing=""; command -v redis-server >/dev/null || missing="redis-server"; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$$missing postgresql"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { timeout 120 apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
	    timeout 300 apt-get install -y -qq --no-install-recommends $$missing; } >/dev/null 2>&1 \
	  || echo "can't be installed:$$missing; their tests are skipped"; fi

test: $(STAMP) databases ## all tests that need nothing but Python
	$(PY) -m pytest -q -m "not interop and not large" $(ARGS)

check: $(STAMP) ## format, lint, types, house rules, unit and property tests
	$(VENV)/bin/ruff format --check src tests examples docs benchmarks
	$(VENV)/bin/ruff check src tests examples docs benchmarks
	$(VENV)/bin/mypy
	$(PY) docs/make_docs.py --check
	$(PY) -m pytest -q tests/house tests/unit tests/property

spark-large: $(STAMP) ## the Spark connector with millions of messages, and killed at every step
	$(PY) -m pytest -q -m large tests/spark $(ARGS)

interop: $(STAMP) ## official Java and Go clients, a Node client and Apache RocketMQ against CometMQ, both ways
	$(PY) -m pytest -q -m interop tests/interop $(ARGS)

crash: $(STAMP) ## kill -9 under load, 200 times over all points and both flush modes (KILLS=n)
	COMETMQ_KILLS=$${KILLS:-200} $(PY) -m pytest -q tests/crash $(ARGS)

sim: $(STAMP) ## the simulated cluster: SEED=n for one seed (PLAIN=1: plain messages only), else fresh seeds for SECONDS (60)
	$(PY) -m cometmq.testing.simulate $(if $(SEED),--seed $(SEED) $(if $(PLAIN),--plain),--seconds $(or $(SECONDS),60))

soak: $(STAMP) ## fresh seeds until Ctrl-C, on all cores; failed ones go to .cache/soak-failures.txt
	$(PY) -m cometmq.testing.simulate --soak --failures .cache/soak-failures.txt $(if $(JOBS),--jobs $(JOBS)) $(if $(COUNT),--count $(COUNT))

$(VENV)/.plots: $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt 'matplotlib>=3.8,<4' \
	  && touch $@ || echo "matplotlib can't be installed: no plots"

bench: $(VENV)/.plots ## CometMQ beside the C limit; ARGS=--quick for a short run
	$(PY) benchmarks/run.py $(ARGS)

bench-growth: $(STAMP) ## does a message cost more as things grow? ARGS=--quick
	$(PY) benchmarks/growth.py $(ARGS)

bench-peers: $(STAMP) ## beside Apache RocketMQ, Redis Streams and NATS JetStream
	$(PY) benchmarks/peers.py $(ARGS)

bench-client: $(STAMP) ## our client beside the official Java client, on one CometMQ broker
	$(PY) benchmarks/client.py $(ARGS)

bench-kinds: $(STAMP) ## delays, timers, transactions, retries, SQL filters beside a plain send; ARGS=--quick
	$(PY) benchmarks/kinds.py $(ARGS)

bench-spark: $(STAMP) ## the Spark connector beside Parquet and beside rows, each figure with its target; ARGS=--quick
	$(PY) benchmarks/spark.py $(ARGS)

docs: $(STAMP) ## make the generated pages in docs/ anew
	$(PY) docs/make_docs.py

lock: $(STAMP) ## write the exact versions in use to constraints.txt
	@{ echo "# Exact versions for make setup; made by make lock."; \
	   $(PY) -m pip list --format=freeze --exclude cometmq --exclude pip --exclude setuptools; } > constraints.txt

clean: ## remove what make made
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/.build src/cometmq/_fast/*.so
