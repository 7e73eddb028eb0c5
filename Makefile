# One word each, the same here and in CI. Everything is installed into .venv by `make setup`, which the others call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test test-all test-torch check bench dist setup-xla test-xla setup-hf test-hf finetune setup-bnb test-bnb setup-clients clients clients-short setup-track test-track setup-storage test-storage prove-gpu pictures setup-docs docs

setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 14) or sys.exit(f"Python 3.11 to 3.14 is needed, where torch has wheels; this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: setup
	$(BIN)/shardwright train recipes/quickstart.toml

# Two files of tests at a time. What fails beside another, where a limit of seconds may be too short, runs again alone,
# and has to pass then.
PYTEST = $(1)/python -m pytest -n 2 --dist loadfile $(2) || \
  $(1)/python -m pytest --last-failed --last-failed-no-failures none $(2)

# What a change is likely to break, in at most 8 minutes on two idle cores.
test: setup
	$(call PYTEST,$(BIN),-m "not slow")

# The whole matrix and what takes long besides: kills, random faults, real restarts, environments made anew.
test-all: setup
	$(call PYTEST,$(BIN),--durations=40)

# `make test` on another torch, in an environment of its own; docs/versions.md says what came of it.
# Exactly 2.13.0 is a build without CUDA where the index has one; others bring 5 GB.
TORCH ?= 2.14.1
OTHER := .venv-torch-$(TORCH)

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest tests/pure tests/ranks tests/device -m "not slow"

$(OTHER)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' requirements.lock > $(OTHER)/requirements.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(OTHER)/requirements.txt torch==$(TORCH)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check src tests bench
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest --quiet tests/pure/test_house.py

bench: setup
	$(BIN)/python bench/step.py --short

# The pictures of docs/ again, each of a run of this machine. The step beside FSDP2's takes root, for its link.
pictures: setup
	$(BIN)/python -m bench.pictures

# The site, into build/site: fails on a broken link or anchor, and looks at what was built. Setting up needs a network, building none.
setup-docs: .venv-docs/.installed

.venv-docs/.installed: requirements.lock
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock "mkdocs==1.6.1" "mkdocs-material==9.8.1" "mkdocstrings==1.0.8" "mkdocstrings-python==2.0.11" ruff
	@touch $@

docs: setup setup-docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	$(BIN)/python -m pytest --quiet tests/site
	@echo "open build/site/index.html, or with search: $(BIN)/python -m http.server --directory build/site"

# What only accelerators can show, on one page (docs/gpu.md); DEVICE=sim runs it at toy size on the CPU.
# PROVE_PYTHON=python3 takes another Python than this one's, whose torch has been built for the accelerator.
DEVICE ?= accelerator
PAGE ?= runs/prove-gpu.md
PROVE_PYTHON ?=

prove-gpu: $(if $(PROVE_PYTHON),,setup)
	PYTHONPATH=src:. $(or $(PROVE_PYTHON),$(BIN)/python) -m bench.prove_gpu --device $(DEVICE) --page $(PAGE)

# A wheel and a source distribution, for projects of one's own: pip install -c requirements.lock 'dist/shardwright-...whl[train]'
DIST ?= dist

dist: setup
	$(BIN)/python -m hatchling build --directory $(DIST)
	$(BIN)/python -m tests.dist $(DIST)

# The XLA backend has an environment of its own. torchax is taken without its dependencies: it asks for none that
# the backend uses, and its releases fail to import with torch 2.13 (hence the pinned nightly).
setup-xla: .venv-xla/.installed

.venv-xla/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-xla
	.venv-xla/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock "jax[cpu]==0.10.2" "optax==0.2.8"
	.venv-xla/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --pre "torchax==0.0.14.dev20261026"
	.venv-xla/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-xla: setup-xla
	$(call PYTEST,.venv-xla/bin,tests/xla)

# Models of Hugging Face: an environment of its own, so that the main one stays light.
setup-hf: .venv-hf/.installed

.venv-hf/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-hf
	.venv-hf/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock "transformers==5.24.0" "accelerate==1.15.0" "datasets==5.2.0" "peft==0.21.2" "lightning-fabric==2.6.6" "lightning==2.6.6" "bitsandbytes==0.50.2"
	.venv-hf/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-hf: setup-hf
	export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error; $(call PYTEST,.venv-hf/bin,tests/hf --durations=10)

# Frameworks that import torch.distributed.fsdp by themselves, with our names in its place. torchtitan is taken without
# its dependencies, of which it needs these here: others of them bring other versions of what the rest is run with.
setup-clients: .venv-clients/.installed

.venv-clients/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock "transformers==5.24.0" "accelerate==1.15.0" "peft==0.21.2" "trl==1.16.0" "lightning-fabric==2.6.6" "lightning==2.6.6"
	-.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "torchtitan==0.3.0" "spmd_types==0.2.3" "torch_checkpointing==0.1.1" "tyro==1.0.17" "einops==0.8.2" "torchdata==0.11.0" "typeguard==4.6.0" "docstring_parser==0.18.0"
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Runs every client (at most 20 minutes) and writes docs/compatibility.md; clients-short checks the rows that need this environment.
clients: setup-clients
	HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error .venv-clients/bin/python -m tests.clients.table

clients-short: setup-clients
	HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error .venv-clients/bin/python -m tests.clients.table --short

# The libraries of shardwright[track], in an environment of their own: 280 MiB beside torch, and trackio needs pillow below 13.
setup-track: .venv-track/.installed

.venv-track/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-track
	grep -v '^pillow==' requirements.lock > .venv-track/requirements.txt
	.venv-track/bin/python -m pip install --quiet --disable-pip-version-check --requirement .venv-track/requirements.txt "tensorboard==2.21.0" "wandb==0.31.0" "mlflow-skinny==3.17.2" "trackio==0.43.0"
	.venv-track/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-track: setup-track
	.venv-track/bin/python -m pytest tests/ranks/test_trackers.py

# s3:// and gs://, against a server of each: an environment of its own, since botocore needs an older python-dateutil.
setup-storage: .venv-storage/.installed

.venv-storage/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-storage
	grep -v '^python-dateutil==' requirements.lock > .venv-storage/requirements.txt
	.venv-storage/bin/python -m pip install --quiet --disable-pip-version-check --requirement .venv-storage/requirements.txt "s3fs==2026.9.0" "moto[server]==5.2.5" "gcsfs==2026.8.2" "gcp-storage-emulator==2026.7.19"
	.venv-storage/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-storage: setup-storage
	.venv-storage/bin/python -m pytest tests/ranks/test_checkpoint_storage.py

# QLoRA on a base that is trained here: the quickstart's model, exported as a Llama, then torch's own source.
# CORPUS=folder or file for another text, or .jsonl.
CORPUS ?= torch

finetune: setup-hf
	test -f runs/quickstart/model.safetensors || .venv-hf/bin/shardwright train recipes/quickstart.toml
	test -d runs/quickstart-llama || .venv-hf/bin/shardwright export runs/quickstart runs/quickstart-llama
	.venv-hf/bin/shardwright train recipes/finetune-qlora.toml --data.path $(CORPUS)

# Other libraries of 4-bit weights, as oracles and for comparison (bench/finetune.py): an environment of its own.
setup-bnb: .venv-bnb/.installed

.venv-bnb/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-bnb
	.venv-bnb/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock "bitsandbytes==0.50.2" "torchao==0.18.0" "peft==0.21.2" "transformers==5.24.0"
	.venv-bnb/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

test-bnb: setup-bnb
	.venv-bnb/bin/python -m pytest tests/pure/test_interchange.py tests/pure/test_nf4.py tests/ranks/test_quantised.py tests/ranks/test_quantised_states.py tests/ranks/test_nf4_given.py tests/hf/test_peft.py
