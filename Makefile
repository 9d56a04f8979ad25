# hookkit: everything a person runs. `make help` lists it.

PYTHON        ?= python3
VENV          ?= .venv
# What pip installs as torch, before anything else. A GPU user names another build, e.g.
#   make demo HOOKKIT_TORCH="torch==2.13.0 --index-url <the index of your CUDA version>"
HOOKKIT_TORCH ?= torch==2.13.0
ARGS          ?=
# Processes that run the tests, with a thread each; a file in one of them, in the order of their
# names: else the longest files, of few tests, would come last.
WORKERS       ?= 2

BIN   := $(VENV)/bin
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
STAMP := $(VENV)/.hookkit-installed
INTEG := $(VENV)/.hookkit-integrations
PEERS := $(VENV)/.hookkit-bench
DOCS  := $(VENV)/.hookkit-docs

.PHONY: help env demo test test-gpu test-quick bench bench-gpu lint types format golden wheel extras integrations docs docs-serve clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

env: $(STAMP)  ## create the environment (quick when it is there)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hookkit needs Python 3.11 or newer: choose one with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt pip
	$(BIN)/python -m pip install -q --disable-pip-version-check $(HOOKKIT_TORCH)
	sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --group dev -e '.[all]'
	touch $(STAMP)

$(INTEG): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --group integrations
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --no-deps --group fastai
	touch $(INTEG)

$(PEERS): $(INTEG)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --group bench
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --no-deps surgeon-pytorch
	touch $(PEERS)

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt --group docs
	touch $(DOCS)

demo: $(STAMP)  ## train on real digits, print and draw what every layer did (ARGS="--epochs 3")
	$(BIN)/python -m hookkit.testing.demo $(ARGS)

test: $(STAMP) lint types  ## the whole suite: ruff, mypy strict, pytest with doctests
	$(PYTEST) $(ARGS)

test-quick: $(STAMP)  ## pytest without slow tests, the zoo and several processes: about a minute
	$(PYTEST) -m "not slow and not zoo and not ranks" $(ARGS)

test-gpu: $(STAMP)  ## only the tests that need an accelerator (HOOKKIT_TEST_DEVICE=cuda:1)
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

integrations: $(INTEG)  ## add the libraries that hookkit is tested beside

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: $(STAMP)  ## rewrite the golden files after an intended change of output
	$(BIN)/python -m pytest -q tests --update-golden

wheel: $(STAMP)  ## build archive and wheel; the suite on it without slow and zoo, the sources out of sight
	bash .ci/wheel tests --pyargs hookkit -n $(WORKERS) --dist loadfile -m "not slow and not zoo" $(ARGS)

extras:  ## each extra alone, in an environment of its own
	bash .ci/extras

bench: $(PEERS)  ## all benchmarks with peers in one run, as benchmarks/TABLE.md (ARGS=--full for more rounds)
	$(BIN)/python benchmarks $(ARGS)

bench-gpu: $(STAMP)  ## those that run on a CUDA device, as benchmarks/TABLE_cuda.md
	$(BIN)/python benchmarks --device cuda $(ARGS)

docs: $(DOCS)  ## build the site into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs docs/_build/html

docs-serve: docs  ## build the site and show it on http://localhost:8000/hookkit, where it is published too
	mkdir -p docs/_build/site/hookkit
	ln -sfn ../../html docs/_build/site/hookkit/$$($(BIN)/python -c "import hookkit; print(hookkit.__version__)")
	$(BIN)/python -m http.server -d docs/_build/site 8000

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist runs docs/_build .pytest_cache .mypy_cache .ruff_cache
