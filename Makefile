# egressd: `make demo` shows it at work, `make test` proves it, `make check` is the fast half.
# Needs Linux and Python >= 3.12; all else is installed (Debian packages only when root).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
PATH := $(PATH):/usr/local/sbin:/usr/sbin:/sbin
export PATH
ARGS ?=
RUNS ?= 15
JOBS ?= 2

.PHONY: help demo test check bench clients soak image clean packages peers

help: ## this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: .venv/ready packages ## real tools in a sandbox, allowed and refused; ARGS="--json --keep"
	@$(BIN)/egressd demo $(ARGS)

test: .venv/ready packages peers ## every test but the soaks; ARGS="-k names -x" JOBS=1
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: .venv/ready ## formatting, lint and types; no test runs
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: .venv/ready packages ## start-up beside peers, a credential's cost, then the test suite's slowest parts; RUNS=15
	@$(BIN)/python -m bench.startup $(RUNS)
	@$(BIN)/python -m bench.credentials
	@$(BIN)/python -m bench.rules
	@$(BIN)/python -m bench.journal
	@$(BIN)/python -m bench.log
	@echo 'bench: these are the 25 slowest tests, which bound nothing.'
	@$(BIN)/python -m pytest -q --durations=25 $(ARGS)

clients: .venv/ready packages ## real clients behind egressd: docs/clients.md; installs them once; ARGS="--only git"
	@$(BIN)/python -m tests.clients $(ARGS)

soak: .venv/ready packages ## ten minutes of fuzzing for every parser; FUZZ_SECONDS=60 ARGS="-k hello -n 2"
	@$(BIN)/python -m pytest -m soak --timeout=1800 $(ARGS)

image: ## the container image, by podman, docker or buildah; BASE=… for another base
	@engine=$$(command -v podman || command -v docker || command -v buildah) || \
	    { echo 'no podman, docker or buildah.' >&2; echo 'hint: apt-get install podman' >&2; exit 3; }; \
	"$$engine" build $(if $(BASE),--build-arg BASE=$(BASE)) -f Containerfile -t egressd:dev .

clean: ## everything that make made
	@rm -rf .venv build dist .fuzz .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

packages:
	@tools/packages

peers: .venv/ready
	@tools/peers

.venv/ready: pyproject.toml tools/venv tools/python
	@tools/venv
	@touch $@
