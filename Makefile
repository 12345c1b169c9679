# Everything here makes .venv by itself when it is missing or pyproject.toml is newer. No activation needed.
#   make quickstart   train a drafter, measure it and the shipped one, verify every manifest (minutes, CPU)
#   make lab          every evaluation once on the shipped drafter, at sizes that only show that it runs (minutes, CPU)
#   make test         the default tests;  make test-all: the slow ones too
#   make lint         ruff, rules and layout
# BACKEND=cpu|cuda12|cuda13 picks MLX's backend on Linux; PYTHON=... the interpreter.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test
.PHONY: quickstart lab test test-all lint

BACKEND ?= cpu
BIN := .venv/bin
READY := .venv/.ready-$(BACKEND)
# A first look is worth having on a busy machine too; the rows say that they were disturbed.
PROMPTS := --prompts suite --limit 10 --max-tokens 24 --block-sizes 4 --repeats 1 --include-disturbed

$(READY): pyproject.toml
	@scripts/venv.sh $(BACKEND)

# Each command ends in a JSON line; only the last one's is kept, so that the whole ends in one.
quickstart: $(READY)
	@$(BIN)/python scripts/train.py +experiment=quickstart | sed '$$d'
	@$(BIN)/python scripts/spec_decode.py ksweep --target smollm2 --drafter runs/quickstart $(PROMPTS) | sed '$$d'
	@$(BIN)/python scripts/spec_decode.py ksweep --target smollm2 --drafter runs/smollm2-135m-dflash $(PROMPTS) | sed '$$d'
	@$(BIN)/python scripts/manifest.py verify --all

LAB := --target smollm2 --drafter runs/smollm2-135m-dflash --smoke
# Not 4 bits: MLX's quantised products are slow on a CPU, and this has to end in minutes.
VARIANT := runs/variants/smollm2-ablated

lab: $(READY)
	@test -d $(VARIANT) || $(BIN)/python scripts/make_variant.py ablated --prompts gsm8k humaneval --limit 4 --out $(VARIANT)
	@for command in ksweep walk context controls adaptive confidence staged cost; do \
		$(BIN)/python scripts/spec_decode.py $$command $(LAB) --out runs/lab/$$command.json; done
	@$(BIN)/python scripts/spec_decode.py transfer $(LAB) --variants $(VARIANT) --out runs/lab/transfer.json
	@$(BIN)/python scripts/spec_decode.py decompose $(LAB) --variant $(VARIANT) --out runs/lab/decompose.json

test: $(READY)
	@$(BIN)/python -m pytest -q

test-all: $(READY)
	@$(BIN)/python -m pytest -q -m "slow or not slow"

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
