# Everything here makes .venv by itself when it is missing or pyproject.toml is newer. No activation needed.
#   make quickstart   train a drafter, measure it and the shipped one, verify every manifest (minutes, CPU)
#   make test         the default tests;  make test-all: the slow ones too
#   make lint         ruff, rules and layout
# BACKEND=cpu|cuda12|cuda13 picks MLX's backend on Linux; PYTHON=... the interpreter.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.PHONY: quickstart test test-all lint

BACKEND ?= cpu
BIN := .venv/bin
READY := .venv/.ready-$(BACKEND)
PROMPTS := --prompts suite --limit 10 --max-tokens 24 --block-sizes 4 --repeats 1

$(READY): pyproject.toml
	@scripts/venv.sh $(BACKEND)

# Each command ends in a JSON line; only the last one's is kept, so that the whole ends in one.
quickstart: $(READY)
	@$(BIN)/python scripts/train.py +experiment=quickstart | sed '$$d'
	@$(BIN)/python scripts/spec_decode.py ksweep --target smollm2 --drafter runs/quickstart $(PROMPTS) | sed '$$d'
	@$(BIN)/python scripts/spec_decode.py ksweep --target smollm2 --drafter runs/smollm2-135m-dflash $(PROMPTS) | sed '$$d'
	@$(BIN)/python scripts/manifest.py verify --all

test: $(READY)
	@$(BIN)/python -m pytest -q

test-all: $(READY)
	@$(BIN)/python -m pytest -q -m "slow or not slow"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
