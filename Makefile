# One environment in .venv serves every target. It is made at first use, again when pyproject.toml or constraints.txt
# change, and reused otherwise.
PYTHON ?= python3
RANKS ?= 2
JOBS ?= 2
DATA ?=
ARGS ?=
PEER ?= .peer/bin/python
EXTRAS ?= test,data,cpu,plan,migrate,serve,perf,examples

BIN := .venv/bin
# pip tells what it fetches and how far it is; where torch is there already, what it would list is satisfied
QUIET = $(if $(wildcard .venv/lib*/python*/site-packages/torch),-q)
PIP = $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check -c constraints.txt
# from 25.1 on pip shows a bar while it unpacks, half a minute without a word before; where it is not to be had, the old
NEWER_PIP = { $(BIN)/python -m pip install -q --disable-pip-version-check --upgrade 'pip>=25.1' \
    || echo "the pip of $(PYTHON) stays: it says nothing for half a minute while it unpacks"; }
# triton has wheels for Linux only; without it the kernels run on their torch twins
TRITON := triton; platform_system == 'Linux'
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
# ranks and test processes share the cores
export OMP_NUM_THREADS ?= $(shell n=$$(( $(CORES) / $(RANKS) )); echo $$(( n > 0 ? n : 1 )))

.DEFAULT_GOAL := help
.PHONY: help env dev demo quick test test-all phases test-long durations perf evidence matrix kernels-check installed lint links types docs check clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "settings: DATA=<folder>  RANKS=$(RANKS)  JOBS=$(JOBS)  PYTHON=$(PYTHON)  ARGS='<more options of the example>'"

.venv/.installed: pyproject.toml constraints.txt
	@echo "[1/2] creating .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || { $(PYTHON) -m venv .venv && $(NEWER_PIP); }
	@echo "[2/2] installing torch, triton and the test tools into .venv (some minutes the first time)"
	@$(PIP) -e '.[$(EXTRAS)]' "$(TRITON)"
	@touch $@

.venv/.dev: .venv/.installed
	@echo "[dev] installing ruff, mypy, pyright and mkdocs into .venv"
	@$(PIP) -e '.[dev,docs]'
	@touch $@

env: .venv/.installed  ## make the environment in .venv

dev: .venv/.dev  ## the same with ruff, mypy, pyright and what builds the site

# checkpoints of the demo before are overwritten; a folder that ARGS names is treated as train.py does
KEPT := $(if $(findstring --checkpoint-dir,$(ARGS)),,--checkpoint-dir runs/demo/checkpoints --overwrite)

demo: .venv/.installed  ## train a DLRM on RANKS gloo processes: generated clicks, or the files in DATA; runs/demo.html
	@test -z "$(DATA)" || test -d "$(DATA)" || { echo "make demo: DATA=$(DATA): no such folder"; exit 2; }
	@(sleep 2; echo "  torchrun imports torch, and then every rank does") &
	$(BIN)/torchrun --standalone --nproc_per_node=$(RANKS) examples/dlrm/train.py --page runs/demo.html $(KEPT) \
	    --patience 2 --log-every 16 $(if $(DATA),--data "$(DATA)") $(ARGS)

# A file's tests stay together: what one of them sets up serves the others. Long files come first (tests/durations.py).
TESTS := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

quick: .venv/.installed  ## a few minutes: the torch path without processes of ranks, nothing that is marked full
	@$(TESTS) --tier quick

# Triton reads TRITON_INTERPRET when a kernel is defined, so each way of running the kernels is a process of its own.
test: TIER := test
test: phases  ## what a contributor waits for, a quarter of an hour on 2 cores: every area, all four phases

test-all: TIER := all
test-all: phases  ## everything but gpu and long, half an hour in .ci/run, which runs it

# .ci/run sets RETRY: of some 18,000 tests on a machine of others, what failed runs once more by itself, and fails twice if
# the code is wrong. Both runs are printed.
RETRY ?=
again = test $$? = 1 && echo "what failed, once more by itself:" && \
    $(BIN)/python -m pytest --last-failed --last-failed-no-failures none --maxfail 3 --tier $(TIER) $(1)
phase = $(TESTS) --tier $(TIER) $(1) $(if $(RETRY),|| { $(call again,$(1)); })

phases: .venv/.installed
	@echo "tests 1/4: torch path"
	@$(call phase)
	@echo "tests 2/4: Triton kernels in the interpreter"
	@export TRITON_INTERPRET=1; $(call phase,-m interpreted)
	@echo "tests 3/4: Triton kernels compiled for GPUs that need not be present"
	@$(call phase,-m compiled)
	@echo "tests 4/4: compiled kernels executed, without a GPU"
	@$(call phase,-m executed)

test-long: .venv/.installed  ## the rest: what is marked long, for example 1,000 problems of the planner against all assignments
	@$(TESTS) -m long

durations: .venv/.installed  ## what the last run took: files over 20 s; ARGS="compare BEFORE AFTER" compares two of runs/durations
	@$(BIN)/python tests/durations.py $(or $(ARGS),show)

# both cores, as a program has that runs alone
perf: .venv/.installed  ## measure the CPU suite in under 10 minutes: table, runs/perf.json and runs/perf.html
	@mkdir -p runs
	OMP_NUM_THREADS=$(CORES) $(BIN)/shardwise perf run --out runs/perf.json --html runs/perf.html $(ARGS)

# in an environment of its own, which docs/evidence/beside_torchrec.md makes; where there is none, what needs no peer runs in .venv
PEERLESS := criteo_rows fbgemm_cost pipeline_overlap planner_heldout same_bits tier_bits tier_files tier_larger tier_soak tier_step tier_times two_nodes
OWN = $(if $(NAME),$(if $(filter-out $(PEERLESS),$(NAME))$(shell command -v $(PEER)),,.venv))
evidence: $(if $(OWN),.venv/.installed)  ## compare with TorchRec and FBGEMM in PEER (.peer/bin/python) and rewrite the documents; NAME=... for one
	@$(if $(OWN),,command -v $(PEER) > /dev/null || { echo "no interpreter at $(PEER): docs/evidence/beside_torchrec.md makes one; else PEER=<python>"; exit 2; })
	PYTHONPATH=. $(if $(OWN),$(BIN)/python,$(PEER)) -m shardwise.perf.evidence $(NAME) --write $(ARGS)

# in MATRIX (.matrix/), an environment a pair; minutes and gigabytes each, so no part of .ci/run
matrix:  ## the tests on other versions, VERSIONS="torch:triton ...", into perf/results/matrix.json
	$(PYTHON) perf/evidence/matrix.py $(or $(VERSIONS),2.9.0:3.6.0 2.13.0:3.7.1 2.15.0:3.9.0) $(ARGS)

kernels-check: .venv/.installed  ## every kernel compiled by VERSIONS="triton ...", those that pass into perf/compile/checked.json
	$(BIN)/python perf/evidence/matrix.py --kernels $(or $(VERSIONS),3.6.0 3.7.1 3.8.0 3.9.0) $(ARGS)

# in an empty environment of each, removed afterwards; gigabytes of torch, so no part of .ci/run
installed:  ## the wheel and the quick start on PYTHONS="python3.10 python3.13 ...", into perf/results/installed.json
	$(PYTHON) perf/evidence/installed.py $(or $(PYTHONS),python3.10 python3.11 python3.12 python3.13) $(ARGS)

lint: .venv/.dev  ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# they look for shardwise.kernels in shardwise/ alone, whatever setup.py and Python's finders say
links:
	@for name in data embeddings fbgemm inference jagged kernels models perf planner sharding; do test -d shardwise/$$name || { \
		echo "mypy and pyright need the link shardwise/$$name -> ../$$name, which is not here; everything else works without."; \
		echo "In git: git config core.symlinks true; git checkout -- shardwise. Elsewhere: ln -sfn ../$$name shardwise/$$name"; \
		exit 2; }; done

types: links .venv/.dev  ## mypy --strict and pyright
	@$(BIN)/mypy --strict
	@$(BIN)/pyright --pythonpath $(BIN)/python

# 1: the theme says at every build that it is maintained until May 2027
docs: export NO_MKDOCS_2_WARNING := 1
docs: .venv/.dev  ## the site of docs/ into site/, without a network; ARGS=serve shows it while you write
	@PYTHONPATH=. $(BIN)/mkdocs $(or $(ARGS),build --strict --quiet)
	@$(if $(ARGS),,echo "open site/index.html")

check: lint types test  ## everything but the demo

clean:  ## remove .venv, build products and caches
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
