# Everything a developer needs. The work is done by the scripts in .ci, which say in one line what is wrong.
SHELL := /bin/bash

VENV ?= .venv
PORT ?= 30000
HOST ?= 127.0.0.1
PYTHON ?= python3
ARGS ?=
export VENV PORT HOST PYTHON

BIN = $(VENV)/bin
# Its notice is about a later mkdocs, and requirements.lock pins this one.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
# $(call or_say,STEP,HOW TO FIX): after a command; one line when it fails. No commas or quotes in the text.
or_say = || { echo '$(1) failed: $(2)' >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup serve test asan bench check docs dist format clean

help: ## List the goals
	@echo 'Goals of make:'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1@\2/p' Makefile | awk -F@ '{ printf "%-10s %s\n", $$1, $$2 }'
	@echo 'Variables: VENV=$(VENV) PORT=$(PORT) HOST=$(HOST) PYTHON=$(PYTHON) ARGS="more options for serve or test"'

setup: ## Make the environment VENV and fetch the demo model
	@.ci/setup.sh

serve: ## Serve the demo model on PORT, in the foreground
	@.ci/serve.sh $(ARGS)

# Tests compute little at a time: threads that wait for each other would take several times as long on a busy machine.
test: setup ## Run the tests; ARGS goes on to pytest
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(ARGS) $(call or_say,test,see the summary of pytest above)

asan: setup ## Run the kernel tests with the address and undefined behaviour sanitizers of the compiler
	@# libstdc++ first too: Python does not bring it, and the sanitizer wants its exceptions. What it finds is not captured.
	@CSA2_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 \
		LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
		$(BIN)/python -m pytest --capture=sys test/sgl_kernels test/csa2 -k cpu $(ARGS) $(call or_say,asan,see the report of the sanitizer above)

bench: setup ## Run a selection of the benchmarks, some ten minutes
	@benchmark/recipes/selection.sh $(call or_say,bench,see the error above)

check: setup ## Lint, format, types and generated documents
	@echo 'check: ruff check' && $(BIN)/ruff check . $(call or_say,check,ruff found the faults above)
	@echo 'check: ruff format' && $(BIN)/ruff format --check . $(call or_say,check,run `make format`)
	@echo 'check: mypy' && $(BIN)/mypy $(call or_say,check,mypy found the faults above)
	@echo 'check: docs/options.md' && $(BIN)/python -m sglang_csa2.options_doc --check docs/options.md \
		$(call or_say,check,docs/options.md is not what the options say; run python -m sglang_csa2.options_doc docs/options.md)
	@echo 'check: documentation site' && $(SITE) --quiet $(call or_say,check,mkdocs found the faults above)

docs: setup ## Build the documentation site into build/site
	@$(SITE) $(call or_say,docs,mkdocs found the faults above)

dist: setup ## Build wheel and source distribution into dist
	@$(BIN)/python -m build --no-isolation $(call or_say,dist,see the end of the log above)

format: setup ## Format the code
	@$(BIN)/ruff format .

clean: ## Remove the environment VENV and the caches of the tools
	@.ci/clean.sh
