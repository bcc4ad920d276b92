# `make` lists the targets. Set-up (.venv, locked packages, the wheel) is scripts/setup.sh; it does only what is missing.
SHELL := bash
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test build build-cuda wheel lint test-rust loom stress asan test-python test-vllm test-vllm-older test-cuda-double instructions fuzz mutants mutants-cuda bench bench-rivals bench-vllm gpu-test gpu-bench fmt lock clean

PY := .venv/bin/python
ARGS ?=
LOCK_ARGS ?=
FUZZ_SECONDS ?= 3600
VLLM_VERSIONS ?= 0.31.0 0.30.0
FUZZ_TOOLCHAIN ?= nightly-x86_64-unknown-linux-gnu
# Without a sanitizer and without giving memory back after each run the fuzzer is six times as fast; afterwards all that
# it has found is run once more under the address sanitizer.
FUZZ_OPTIONS := -max_len=2048 -len_control=20 -timeout=20 -print_final_stats=1

# Tests and demo run against the installed wheel, never against the source tree or a user's own packages.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP
export PYTHONNOUSERSITE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_USER := 0
# pyo3 asks this interpreter what to build for.
export PYO3_PYTHON := $(CURDIR)/$(PY)

# Under another HOME, rustup's cargo does not find its toolchains; they lie beside it.
ifeq ($(RUSTUP_HOME)$(wildcard $(HOME)/.rustup/toolchains/*),)
  cargo_home := $(patsubst %/bin/cargo,%,$(shell command -v cargo))
  ifneq ($(and $(cargo_home),$(wildcard $(cargo_home)/../.rustup/toolchains/*)),)
    export RUSTUP_HOME := $(cargo_home)/../.rustup
  endif
endif

# Without GPU_PYTHON: the extension is compiled, and .venv gets a wheel with it.
GPU_SETUP = @$(if $(GPU_PYTHON),true,$(MAKE) --no-print-directory build-cuda && scripts/setup.sh --wheel run demo test)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: ## set up .venv, build and install the wheel, run `kvtier demo` (options: ARGS="--documents 20")
	@scripts/setup.sh --wheel run demo
	.venv/bin/kvtier demo $(ARGS)

test: build-cuda lint test-rust loom test-cuda-double test-python test-vllm instructions ## set up .venv, build and install the wheel, run every check and every test

build: ## build the wheel in release mode and install it in .venv, without the demo's packages
	@scripts/setup.sh --wheel run

build-cuda: ## compile the CUDA extension into python/kvtier, from where the next wheel takes it (NVCC=path: another nvcc)
	@scripts/prerequisites.sh --cxx >/dev/null
	@$(if $(NVCC),,scripts/setup.sh cuda)
	scripts/build_cuda.sh

wheel: build ## build the wheel in release mode: dist/kvtier-*.whl
	@ls -l dist/kvtier-*.whl

lint: ## check formatting, lints, types and the type stub of the core
	@scripts/prerequisites.sh --lint >/dev/null
	@scripts/setup.sh --wheel run demo test
	cargo fmt --check
	cargo clippy --locked --all-targets --all-features -- -D warnings
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) scripts/check_notes.py
	$(PY) scripts/mutate.py --check
	$(PY) scripts/mutate_cuda.py --check
	$(PY) -m mypy.stubtest --mypy-config-file pyproject.toml kvtier._core

test-rust: ## run the Rust tests
	@scripts/prerequisites.sh >/dev/null
	KVTIER_STRESS_SECONDS=30 cargo test --locked

loom: ## run the loom models of the table's protocols (about a minute with the build; LOOM_MAX_PREEMPTIONS=3: deeper)
	@scripts/prerequisites.sh >/dev/null
	RUSTFLAGS="--cfg kvtier_loom" CARGO_TARGET_DIR=target/loom CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS=true \
	  CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
	  timeout 600 cargo test --locked --release --lib models

stress: ## ten minutes of real threads on a small table
	@scripts/prerequisites.sh >/dev/null
	KVTIER_STRESS_SECONDS=600 cargo test --locked --test stress -- --nocapture

asan: ## run the Rust tests under the address sanitizer (needs a nightly toolchain: NIGHTLY=name)
	RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR=target/asan \
	  cargo +$(or $(NIGHTLY),nightly) test --locked --target x86_64-unknown-linux-gnu --lib --test model --test stress --test memory --test store_limits --test admission --test eviction_order

test-python: ## run the Python tests against the installed wheel (options: ARGS="-k admit")
	@scripts/setup.sh --wheel run demo test
	KVTIER_REQUIRE_CORE=1 KVTIER_REQUIRE_TORCH=1 OMP_NUM_THREADS=1 KVTIER_WHEEL="$$(ls dist/kvtier-*.whl)" \
	  $(PY) -m pytest $(ARGS)

test-vllm: ## set up .venv-vllm (vLLM for CPU), install the wheel there, run the connector in the real engine
	@scripts/setup.sh --wheel run
	@scripts/setup-vllm.sh
	.venv-vllm/bin/python -m pytest tests/vllm -p no:cacheprovider $(ARGS)

test-vllm-older: ## run the connector in older versions of vLLM, too (VLLM_VERSIONS), each in an environment of its own
	@scripts/setup.sh --wheel run
	@for version in $(VLLM_VERSIONS); do \
	  scripts/setup-vllm.sh $$version && .venv-vllm-$$version/bin/python -m pytest tests/vllm -p no:cacheprovider $(ARGS) || exit 1; \
	done

bench-vllm: ## figures of the connector in vLLM on CPU; writes benches/results/vllm-<date>.json (options: ARGS="--rounds 9")
	@scripts/setup.sh --wheel run
	@scripts/setup-vllm.sh
	.venv-vllm/bin/python benches/python/vllm/bench_vllm.py --write $(ARGS)

fuzz: ## fuzz the table for FUZZ_SECONDS (3600); needs cargo-fuzz and a nightly toolchain, keeps its corpus in fuzz/corpus
	@mkdir -p fuzz/corpus/model
	MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=1000000000 \
	  cargo +$(FUZZ_TOOLCHAIN) fuzz run --sanitizer none model -- -max_total_time=$(FUZZ_SECONDS) $(FUZZ_OPTIONS)
	cargo +$(FUZZ_TOOLCHAIN) fuzz run model -- -runs=0 $(FUZZ_OPTIONS)

mutants: ## put faults into a copy of the table, one at a time, and show that tests or models fail for each
	python3 scripts/mutate.py $(ARGS)

test-cuda-double: ## test the host code of the CUDA extension, without CUDA, also under the address and thread sanitizers
	@scripts/prerequisites.sh --cxx >/dev/null
	$(MAKE) --silent -j2 -C tests/cuda_double run

mutants-cuda: ## put faults into a copy of the CUDA extension and show that a test against the double fails for each
	python3 scripts/mutate_cuda.py $(ARGS)

instructions: ## count the instructions of fixed work by callgrind and compare with benches/instructions.json (ARGS=--update)
	@scripts/prerequisites.sh >/dev/null
	python3 scripts/instructions.py $(ARGS)

bench: ## run all benches of the table; writes benches/results/<date>.json and docs/benchmarks.md (with rivals, after bench-rivals)
	@scripts/setup.sh --wheel run bench
	cargo bench --locked --bench table
	$(PY) -m pytest -q -p no:cacheprovider benches/python/test_bench_table.py
	$(PY) benches/python/bench_side_by_side.py --write

bench-rivals: ## install the systems that `make bench` compares with in .venv-bench (about 3 GB on top of torch)
	scripts/bench_rivals.sh

gpu-test: ## test the CUDA extension on a GPU, skipped where there is none (GPU_PYTHON=python3: one that has kvtier's wheel, torch, pytest)
	$(GPU_SETUP)
	$(or $(GPU_PYTHON),$(PY)) -m pytest -p no:cacheprovider tests/gpu $(ARGS)

gpu-bench: ## measure the CUDA extension on a GPU (options: ARGS="--json FILE --write"; GPU_PYTHON as for gpu-test)
	$(GPU_SETUP)
	$(or $(GPU_PYTHON),$(PY)) benches/python/gpu/bench_gpu.py $(ARGS)

fmt: ## format the Rust and the Python code
	@scripts/setup.sh test
	cargo fmt
	$(PY) -m ruff check --fix-only --quiet
	$(PY) -m ruff format

RESOLVE = UV_CUSTOM_COMPILE_COMMAND="make lock" $(PY) -m uv pip compile --quiet --universal --python-version 3.11 \
  --fork-strategy fewest --generate-hashes $(LOCK_ARGS)

lock: ## resolve requirements/*.lock again, after a change of pyproject.toml or requirements/*.in (newer: LOCK_ARGS=--upgrade)
	@scripts/setup.sh resolver
	$(RESOLVE) requirements/resolver.in -o requirements/resolver.lock
	$(RESOLVE) requirements/build.in -o requirements/build.lock
	$(RESOLVE) pyproject.toml --extra demo -c requirements/demo.in -o requirements/demo.lock
	$(RESOLVE) pyproject.toml -c requirements/demo.lock -o requirements/run.lock
	$(RESOLVE) requirements/test.in -c requirements/demo.lock -o requirements/test.lock
	$(RESOLVE) requirements/cuda.in -c requirements/demo.lock -o requirements/cuda.lock
	$(RESOLVE) requirements/bench.in -c requirements/test.lock -o requirements/bench.lock

clean: ## remove .venv and everything that was built
	rm -rf python/kvtier/libkvtier_cuda.so .venv .venv-bench .venv-vllm* dist target .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
