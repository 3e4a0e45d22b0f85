# Every target sets up what it needs on a fresh clone and is quick when that is done already.
#
#   make demo       watch a training job being killed and come back at the exact bits (minutes)
#   make demo-nodes watch whole hosts being destroyed and their ranks come back from their peers' memory (minutes)
#   make demo-pipeline watch workers of a pipeline being lost and only their stages work again (minutes)
#   make demo-reroute watch workers of a pipeline being lost for good and the others do their work (minutes);
#                   REROUTE_FLAGS="--pipelines 3" has twelve workers
#   make demo-serving watch devices of a tensor-parallel server being killed while clients get their tokens (minutes)
#   make demo-elastic watch hosts vanish and come, and a training go on with those that there are (minutes)
#   make test       ruff, mypy, layering contracts, pytest (what fails, two tests at most, runs once more alone, and is named)
#   make gpu        all that needs a CUDA device, the most important first, within 25 minutes; results into bench/results
#                   GPU_PYTHON=… names the interpreter (python3 if it has torch), GPU_FLAGS="--cpu-twin" tries it on the CPU
#   make docs       the documentation as a static site, into out/site (strict: a warning is an error)
#   make bench      every benchmark, each against its peers in the same run
#   make campaign   a few hundred seeded kills (long); CKPTD_KILLS=n and CKPTD_SEED=n steer it
#   make campaign-host  seeded kills of ranks, zygotes and hosts of a job under hosts (long); CKPTD_KILLS=n and CKPTD_SEED=n steer it
#   make demo-storage    watch every host being destroyed at once and the job come back from an S3 server (minutes)
#   make demo-ops        watch the alerts that faults of a two-node job fire in Prometheus (minutes; needs prometheus)
#   make demo-policies   watch the same kills under four policies, two of which lose updates of experts (minutes)
#   make campaign-failpoints  kills, stops and errors drawn over every store, lock, rename, message and request (long); CKPTD_KILLS=n and CKPTD_SEED=n steer it
#   make campaign-storage  seeded kills in the middle of uploads (long); CKPTD_KILLS=n and CKPTD_SEED=n steer it
#   make campaign-elastic  seeded kills of elastic jobs, most of all while an incarnation starts (long); CKPTD_KILLS=n and CKPTD_SEED=n steer it
#   make campaign-audit  seeded audits of clean steps, and of steps in which a bit flips (long); CKPTD_KILLS=n audits, CKPTD_SEED=n steers it
#   make campaign-matrix   every kind of parallelism, optimizer and precision through a kill, and what make test leaves out (long)
#   make campaign-habits  other people's data pipelines and optimizers, each killed twice: exact or refused (long); CKPTD_SEED=n steers it
#   make fuzz      a million inputs, guided by coverage, to all that reads bytes of others (long); CKPTD_INPUTS=n and CKPTD_SEED=n steer it
#   make lock       choose the versions of all dependencies anew, with their hashes (requirements.lock)
#   make dist       wheel, source archive and SBOM (CycloneDX), into dist/
#   make simulation replication under ten thousand seeded schedules of faults; CKPTD_SCHEDULES=n and CKPTD_SEED=n steer it
#   make simulation-mutations breaks one rule of replication after another: the simulation must notice each (long)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ckptd-installed
PIP_FLAGS ?=
# Says nothing but errors: neither that there is a newer pip, nor which of the configured indexes lack a package.
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)
# Two at a time, file by file (fixtures are shared within a file): most tests wait for processes more than they compute.
PYTEST_FLAGS ?= -n 2 --dist loadfile --no-loadscope-reorder
EXTRAS := bench demo deploy docs release test
CKPTD_KILLS ?= 300
CKPTD_SCHEDULES ?= 10000
CKPTD_INPUTS ?= 1000000
GPU_PYTHON ?=
GPU_OUT ?= out/gpu
GPU_FLAGS ?=
REROUTE_FLAGS ?=

.PHONY: help setup test lint types contracts unit docs demo demo-nodes demo-pipeline demo-reroute demo-serving demo-elastic demo-storage demo-policies demo-ops bench gpu campaign campaign-host campaign-failpoints campaign-storage campaign-elastic campaign-audit campaign-matrix campaign-habits simulation simulation-mutations fuzz kernel lock dist clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One install for all targets: the extras are small beside torch. Every file is checked against its hash but torch's:
# each accelerator has its own build of the one version. It comes last, so that what it needs is there, checked.
$(STAMP): pyproject.toml constraints.txt requirements.lock | $(BIN)/python
	$(PIP) --no-deps --require-hashes -r requirements.lock
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Needs CUDA's compiler. Nothing in the kernel is newer than PTX 7.0 (CUDA 11) and compute capability 7.0.
kernel:
	nvcc -ptx -arch=compute_75 -o out/store_kernel.ptx cuda/csrc/store_kernel.cu
	{ echo "// sha256 of store_kernel.cu: $$(sha256sum < cuda/csrc/store_kernel.cu | cut -d' ' -f1)"; \
		sed -E 's/^\.version .*/.version 7.0/; s/^\.target .*/.target sm_70/' out/store_kernel.ptx; \
	} > cuda/csrc/store_kernel.ptx

lock: | $(BIN)/python
	$(PIP) 'uv>=0.8'
	$(BIN)/uv pip compile --quiet --universal --upgrade --generate-hashes --no-emit-index-url --no-emit-package torch \
		--custom-compile-command 'make lock' -c constraints.txt $(EXTRAS:%=--extra %) pyproject.toml -o requirements.lock

# The SBOM names what the wheel needs when it is installed, in the versions that were tested.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --quiet --no-isolation
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-annotate --no-emit-index-url \
		-c constraints.txt -c requirements.lock pyproject.toml -o dist/runtime.txt
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type library --output-reproducible \
		-o dist/ckptd.cdx.json dist/runtime.txt
	rm dist/runtime.txt

test: lint types contracts unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

unit: $(STAMP)
	$(BIN)/python -m tests.second_run $(PYTEST_FLAGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

demo: $(STAMP)
	$(BIN)/python -m ckptd.demo

demo-nodes: $(STAMP)
	$(BIN)/python -m examples.moe_text.nodes $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

demo-pipeline: $(STAMP)
	$(BIN)/python -m examples.moe_pipeline.demo $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

demo-reroute: $(STAMP)
	$(BIN)/python -m examples.moe_pipeline.rerouted_demo $(if $(CKPTD_SEED),--seed $(CKPTD_SEED)) $(REROUTE_FLAGS)

demo-serving: $(STAMP)
	$(BIN)/python -m examples.moe_serving.demo $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

demo-elastic: $(STAMP)
	$(BIN)/python -m examples.moe_elastic.demo $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

demo-policies: $(STAMP)
	$(BIN)/python -m examples.moe_text.policies

demo-storage: $(STAMP)
	$(BIN)/python -m examples.moe_text.storage $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

demo-ops: $(STAMP)
	$(BIN)/python -m examples.moe_text.operations

bench: $(STAMP)
	@mkdir -p out
	@for subject in schedule window scale papers placement dispatch traces agree stall overhead gpu sharing sampling replicas restore replay transport replication recovery recovery_host rendezvous persist logging localized policies reroute serving; do \
		echo; echo "== bench.$$subject"; \
		$(BIN)/python -m bench.$$subject --json | tee out/bench_$$subject.txt; \
	done

# A machine with a device often has torch and no network: then nothing is installed.
gpu:
	@python="$(GPU_PYTHON)"; \
	if [ -z "$$python" ]; then \
		python="$(BIN)/python"; \
		if [ ! -e "$(STAMP)" ]; then \
			if $(PYTHON) -c 'import torch' 2>/dev/null; then python="$(PYTHON)"; else $(MAKE) setup; fi; \
		fi; \
	fi; \
	exec "$$python" -m bench.gpu_run --out "$(GPU_OUT)" $(GPU_FLAGS)

campaign: $(STAMP)
	$(BIN)/python -m tests.e2e.campaign --kills $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

campaign-host: $(STAMP)
	$(BIN)/python -m tests.e2e.host_campaign --kills $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))
	$(BIN)/python -m tests.e2e.host_campaign --kills $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED)) --in-process

campaign-failpoints: $(STAMP)
	$(BIN)/python -m tests.failpoints.campaign --kills $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED)) --coverage out/campaign_failpoints.json --out out/campaign_failpoints.txt

campaign-storage: $(STAMP)
	CKPTD_LONG=1 $(BIN)/python -m pytest -q tests/e2e/s3
	$(BIN)/python -m tests.e2e.storage_campaign --kills $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

campaign-elastic: $(STAMP)
	$(BIN)/python -m tests.e2e.elastic_campaign --kills $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

campaign-audit: $(STAMP)
	$(BIN)/python -m tests.e2e.audit_campaign --audits $(CKPTD_KILLS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

campaign-matrix: $(STAMP)
	CKPTD_LONG=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m long --ignore tests/habits
	CKPTD_LONG=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) -m 'not long' tests/ckptd/core/elastic

campaign-habits: $(STAMP)
	$(PIP) --no-build-isolation -c constraints.txt -e '.[habits]'
	CKPTD_LONG=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/habits

simulation: $(STAMP)
	$(BIN)/python -m tests.simulation.campaign --schedules $(CKPTD_SCHEDULES) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))

simulation-mutations: $(STAMP)
	$(BIN)/python -m tests.simulation.campaign --mutations

fuzz: $(STAMP)
	$(PIP) --no-build-isolation -c constraints.txt -e '.[fuzz]'
	nice $(BIN)/python -m tests.fuzz.campaign --inputs $(CKPTD_INPUTS) $(if $(CKPTD_SEED),--seed $(CKPTD_SEED))
	CKPTD_FUZZ_SOCKETS=2000 nice $(BIN)/python -m pytest -s --timeout=3600 tests/fuzz/test_sockets.py

clean:
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
