# Two commands: `make serve` and `make test`. Each sets up what it needs in .venv, and may be run any number of times.
#
#   make serve ARGS="--port 9000"        flags of `vlmserve serve`, a MODEL too
#   make test                            linters, types, import rules, and the quick tests
#   make test-full                       all other tests, in three parts; SEED=number repeats their examples:
#   make test-slow                         the slow tests
#   make test-elsewhere                    the quick tests as on an older CPU, beside two busy processes
#   make test-gpu DEVICE=cpu               the GPU's tests on the CPU
#   make docs                            docs/flags.md, made of the settings
#   make wheel                           dist/vlmserve-VERSION-py3-none-any.whl, with the version of the git tag (v0.1.0)
#   make test-gpu                        the tests that need a CUDA device (DEVICE=cpu runs them on the CPU)
#   make gpu-report OUT=folder           checks and measures everything on a GPU, with results in files
#   PYTHON=/path/to/python               the interpreter that makes .venv (3.11 or newer; found by itself)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu      where torch comes from; this one is a small CPU-only build

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
# Only people at a terminal want pip's own lines, for they have a bar that moves.
QUIET_UNLESS_WATCHED = $$([ -t 2 ] || echo --quiet)
TORCH_INDEX ?=
ARGS ?=
PYTEST_ARGS ?=
# The quick tests run in several processes. All tests of a file run in one process, so that they can share what the file
# sets up. Files are taken in their order, since the files with few tests take longest. Each process computes with one
# thread: more threads would wait for one another.
PARALLEL ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
QUICK = HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow and not gpu' $(PARALLEL) $(PYTEST_ARGS)
# How NumPy's BLAS, torch with its libraries, and our own operators compute on a CPU with AVX2 and without AVX-512.
AVX2 := OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
AVX2 += VLMSERVE_CPU_LEVEL=avx2
# The first examples of the property tests in `make test-full` and `make test-elsewhere`.
ifndef SEED
SEED := $(shell od -An -N4 -tu4 /dev/urandom | tr -d ' ')
endif
FRESH = --hypothesis-profile=fresh --hypothesis-seed=$(SEED)
DEVICE ?= cuda

.PHONY: serve setup setup-test lint test test-full test-slow test-elsewhere test-gpu gpu-report docs wheel clean
.DEFAULT_GOAL := serve

serve: setup
	@$(BIN)/python -m vlmserve serve $(ARGS)

setup: $(VENV)/.ready-to-serve

setup-test: $(VENV)/.ready-to-test

# TORCH_INDEX stands beside the usual index: its torch (2.13.0+cpu) goes before that of PyPI (2.13.0), while torch's own
# needs (Jinja, fsspec), which constraints.txt pins, are in such an index in other versions.
$(VENV)/.ready-to-serve: pyproject.toml constraints.txt
	@PYTHON='$(PYTHON)' sh .ci/make-venv $(VENV)
	@echo '1 of 2: PyTorch into $(VENV): 0.2 GB to download if it is for CPUs alone, 3 GB with CUDA; takes minutes'
	@$(PIP) $(QUIET_UNLESS_WATCHED) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo '2 of 2: vlmserve and its libraries (transformers, Triton, PyAV ...): 0.4 GB to download; takes a minute or two'
	@$(PIP) --quiet -e .
	@touch $@
	@echo 'Installed.'

# torchvision: transformers' image processors, which tests compare with, import it. Its own wish for one exact torch
# build is passed over: only its resizing is used, which is plain torch. instructor's pins of jiter and requests are, too:
# they contradict those of the openai client.
$(VENV)/.ready-to-test: $(VENV)/.ready-to-serve
	@echo 'Linters, and what the tests use (gradio, pyarrow, clients ...): 0.4 GB to download; takes a minute or two'
	@$(PIP) --quiet -e '.[dev]'
	@$(PIP) --quiet --no-deps torchvision instructor
	@touch $@

lint: setup-test
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports

test: lint
	@$(QUICK)

test-full: setup-test
	@$(MAKE) test-slow test-elsewhere SEED=$(SEED)
	@$(MAKE) test-gpu DEVICE=cpu

test-slow: setup-test
	@echo 'The seed of the property tests is $(SEED): make test-slow SEED=$(SEED)'
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'slow and not gpu' -n 2 --dist loadfile $(FRESH) $(PYTEST_ARGS)

test-elsewhere: setup-test
	@echo 'As on a CPU with AVX2, beside two busy processes; the seed is $(SEED): make test-elsewhere SEED=$(SEED)'
	@$(AVX2) .ci/beside-busy env $(QUICK) $(FRESH)

test-gpu: setup-test
	@HF_HUB_OFFLINE=1 VLMSERVE_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

gpu-report: setup-test
	@PYTHON=$(BIN)/python DEVICE=$(DEVICE) sh tests/gpu/report.sh '$(OUT)'

docs: setup
	@$(BIN)/python -m docs.settings_pages > docs/flags.md.new
	@mv docs/flags.md.new docs/flags.md

# build/ may hold files that are gone meanwhile.
wheel:
	@PYTHON='$(PYTHON)' sh .ci/make-venv $(VENV)
	@rm -rf build dist/vlmserve-*.whl
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	@rm -rf build
	@ls dist/*.whl

clean:
	rm -rf $(VENV) .ruff_cache .mypy_cache .pytest_cache .import_linter_cache .hypothesis build dist *.egg-info
