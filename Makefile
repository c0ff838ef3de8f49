# Everything a person types here works on a fresh machine with Python 3.11+ and make. `make help` lists it.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# Tools that only some need, apart from what the server is made of.
TOOLS := build/deploy-tools
LOCUST := $(TOOLS)/venv/bin/locust
# An install is done once: the stamps are older than these files only when something has to be installed again.
INPUTS := pyproject.toml constraints.txt
CREATED := $(VENV)/.created
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help serve fetch test lint format bench loadtest deploy-check api-check ops-check soak clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(BASE) ## fetch the default model once, and serve it (PORT=8123, ARGS="--max-num-seqs 8")
	@$(BIN)/peagle serve --port $(PORT) $(ARGS)

fetch: $(BASE) ## fetch the default model into the cache
	@$(BIN)/peagle fetch $(ARGS)

test: $(DEV) ## run the whole suite (ARGS="tests/unit -k scheduler")
	@$(BIN)/peagle fetch || echo "make test: the default model is not there; the tests that need it will be skipped" >&2
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(DEV) ## ruff, ruff format --check and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV) ## let ruff write the format that lint checks
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(BASE) ## measure the server that runs on PORT (ARGS are those of `peagle bench`)
	@$(BIN)/peagle bench --base-url http://127.0.0.1:$(PORT)/v1 $(ARGS)

loadtest: $(LOCUST) ## put load on the server that runs on PORT; writes build/loadtest.html (ARGS="-u 8 -t 5m")
	@mkdir -p build
	@$(LOCUST) -f loadtest/locustfile.py --headless --host http://127.0.0.1:$(PORT) --only-summary \
	    --html build/loadtest.html -u 4 -r 4 -t 60s --stop-timeout 60 $(ARGS)

deploy-check: $(DEV) ## check the image, compose, the chart and the load test (ARGS="--only chart,compose")
	@$(BIN)/peagle fetch || echo "make deploy-check: the default model is not there; the image will not be run" >&2
	@scripts/deploy_check --tools $(TOOLS) $(ARGS)

api-check: $(DEV) ## llm-comply and schemathesis against a real server process (ARGS="--examples 500")
	@$(BIN)/python scripts/api_check --tools build/api-tools $(ARGS)

ops-check: $(DEV) ## faults, overload, drain and fuzz against real server processes (ARGS="--only drain")
	@$(BIN)/python -m tests.ops $(ARGS)

soak: $(DEV) ## twenty minutes of requests; prints the memory's slope, blocks in use at the end, and errors
	@$(BIN)/peagle fetch
	@$(BIN)/python scripts/soak --minutes 20 $(ARGS)

clean: ## remove what the tools left behind; .venv and the model cache stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "peagle needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(BASE): $(INPUTS) | $(CREATED)
	$(PIP_INSTALL) -e .
	@touch $@

$(LOCUST): deploy/requirements.txt
	$(PYTHON) -m venv $(TOOLS)/venv
	$(TOOLS)/venv/bin/python -m pip --disable-pip-version-check install $$(grep '^locust==' deploy/requirements.txt)
	@touch $@

$(DEV): $(INPUTS) | $(CREATED)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $(BASE) $@
