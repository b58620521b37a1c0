# Two commands do everything: `make train` and `make test`. Each sets up in `.venv` what it needs, and
# finds it ready the next time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
TRAIN := $(VENV)/.installed-train
DEV := $(VENV)/.installed-dev
# What is imported is compiled then; compiling all of torch here would take as long as fetching it.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint requirements.lock
# By path, or a clone called moe_ffn in the current folder would shadow the package.
EDITABLE := --config-settings editable_mode=compat
CODE := moe_ffn experiments tests docs

.PHONY: help setup train test test-slow test-gpu test-reliability lint format docs lock clean readme studies demo-model

help:  ## say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(DEV)  ## make .venv with the locked versions of everything

train: $(TRAIN)  ## train the default model, an 8-expert top-2 MoE
	$(PY) -m experiments.train

test: lint docs  ## lint, types, docs and tests, in two processes
	$(PY) -m pytest -n 2 --dist worksteal

test-slow: lint  ## the same, with the tests that take longer
	$(PY) -m pytest -m "slow or not slow"

test-gpu: $(DEV)  ## what ranks that share a model compute on GPUs, by NCCL, and how long it takes
	$(PY) -m pytest -m gpu --durations=0 tests/training/test_parallel.py

test-reliability: $(DEV)  ## what docs/explanation/reliability.md promises, all of it tried; hours
	$(PY) -m pytest -n 2 --dist worksteal -m "slow or not slow" tests/reliability

lint: $(DEV)  ## format, lint and types
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/basedpyright

format: $(DEV)  ## fix format and lint
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

docs: $(DEV)  ## build the documentation: build/docs/index.html
	$(PY) -m sphinx -q -E -W --keep-going docs build/docs

readme: $(DEV)  ## write the numbers of README.md anew, from a run of the default model
	$(PY) -m tests.test_readme_numbers

studies: $(DEV)  ## write the pages of docs/studies anew, from the results beside them
	$(PY) -m tests.test_study_pages

demo-model: $(TRAIN)  ## train the model of `moe-ffn demo` again: minutes
	$(PY) -m experiments.train --config configs/demo.yaml --run.name demo-model --trainer.accelerator cpu --trainer.precision 32-true
	$(PY) -c "from moe_ffn.weights.pretrained import load_pretrained, load_tokenizer, save_pretrained; run = 'runs/demo-model/model'; \
	  save_pretrained(load_pretrained(run).bfloat16(), 'build/demo_model', load_tokenizer(run))"
	cp build/demo_model/* moe_ffn/cli/demo_model/

lock:  ## write requirements.lock anew from pyproject.toml's ranges
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install --quiet --editable ".[dev]"
	(echo "# Every version of the environment; written by \`make lock\`."; \
	 $(PY) -m pip freeze --exclude-editable | sed 's/+cpu$$//') > requirements.lock
	touch $(TRAIN) $(DEV)

clean:  ## remove the environment and caches, not the runs
	rm -rf $(VENV) .pytest_cache .ruff_cache build *.egg-info

# torch first and alone: an open range elsewhere must find it installed, or it would fetch another
# build of several gigabytes.
$(TRAIN): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (make PYTHON=/path/to/python)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, got " + sys.version.split()[0])'
	@echo "setting up $(VENV), once; this takes two to five minutes, without a word"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[train]" $(EDITABLE)
	-$(PY) -m moe_ffn.kernels.native
	@touch $@

$(DEV): $(TRAIN)
	@echo "adding to $(VENV) what the tests need, once; this takes another minute"
	$(PIP) --editable ".[dev]" $(EDITABLE)
	@touch $@
