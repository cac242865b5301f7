# train: the main job on this machine; test, rehearse, lint: what a change must pass; bench: side-by-side measurements.
PYTHON ?= python3
NPROC  ?= 2
ZERO   ?= 3
SIZE   ?= 2m
STEPS  ?=
ARGS   ?=

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/peers/.installed
CODE  := $(wildcard src tests examples bench)

# Training and tests start many processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test rehearse lint bench clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,transformers,lightning,mmengine]'
# No extra: its build needs the torch that is installed here. Tests compare with it, or skip.
	-$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation --no-deps fairscale
	@touch $@

train: $(STAMP)
	@$(BIN)/python examples/train_lm.py --nproc $(NPROC) --zero $(ZERO) --size $(SIZE) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

# Two files at a time, since much of it is one process; in order, so that the programs, which take longest, come first.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# The tests for a GPU, on a device that is simulated.
rehearse: $(STAMP)
	SHARDWISE_REHEARSE=simulated $(BIN)/python -m pytest -n 2 --dist loadfile tests/cuda $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict src

# Not where everything else is: Lightning and transformers import DeepSpeed wherever they find it.
$(PEERS): $(STAMP) bench/peers.txt
	@mkdir -p $(@D)
	-$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r bench/peers.txt && touch $@

bench: $(PEERS)
	@$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info
