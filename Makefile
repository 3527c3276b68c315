# SPDX-License-Identifier: Apache-2.0
# make run, make test and make check work from a bare clone; each brings what it needs first (scripts/setup.sh).
# CMake does the building: see CMakePresets.json. All of these build in build/release, each on what is there.
#
#   FLASH3_HOPPER=OFF    the CPU backend alone; ON: the GPU kernels too where there is no GPU
#   FLASH3_CUDA_ROOT=…   your own CUDA toolkit (12.8 or newer) instead of the pinned wheels
#   FLASH3_PYTHON=OFF    without the Python package (make test, make check)
#   FLASH3_WERROR=ON     warnings are errors, as make check has them
#   CMAKE_ARGS=…         more arguments for the configure step
#   FUZZ_TARGET=…        one fuzz target alone; FUZZ_SECONDS=…: for each (make fuzz)

CMAKE_ARGS ?=
INPUT ?= data/minilm_layer0.safetensors

# Without an NVIDIA GPU (WSL has it as /dev/dxg), and not asked to, nothing but make check and the packages builds kernels, which could
# not run here.
has_gpu := $(wildcard /dev/nvidiactl /dev/dxg)
kernels := $(or $(FLASH3_HOPPER),$(if $(has_gpu),AUTO,OFF))

# What make check compiles with; make test before it too, or all would be compiled twice.
FLASH3_WERROR ?= $(if $(filter check,$(MAKECMDGOALS)),ON)
export FLASH3_WERROR

options = $(if $(FLASH3_PYTHON),-DFLASH3_PYTHON=$(FLASH3_PYTHON)) $(if $(FLASH3_WERROR),-DFLASH3_WERROR=$(FLASH3_WERROR)) $(CMAKE_ARGS)
configure_args = $(if $(FLASH3_HOPPER),-DFLASH3_HOPPER=$(FLASH3_HOPPER)) $(options)
here_args = -DFLASH3_HOPPER=$(kernels) $(options)
flash3 = build/release/bin/flash3

.DEFAULT_GOAL := help
.PHONY: help run test check test-torch fuzz bench docs build setup setup-here setup-python setup-gates build-without-python format tidy install hub deb \
        release aarch64 clean distclean

help:
	@echo "make run      build what it takes, then attention on the real input in data/, compared with the oracle"
	@echo "make test     is this build right here? The library, the program and the Python package, built and tested: minutes"
	@echo "make check    is this commit right? make test, then kernels, sanitizers, gates, packages, JAX, transformers: a quarter of an hour"
	@echo "make test-torch TORCH=2.15.0  the Python package's tests with that torch (after make test)"
	@echo "make fuzz     the fuzz targets, ten minutes each (FUZZ_SECONDS, FUZZ_TARGET)"
	@echo "make bench    build, then time the case list on this machine"
	@echo "make docs     the documentation as a web site: build/docs/html/index.html"
	@echo "make format   clang-format on every source"
	@echo "make tidy     clang-tidy on every source, also of tools and tests"
	@echo "make build    all that ships: the libraries, the program and the examples"
	@echo "make install  build, then install to PREFIX (default /usr/local)"
	@echo "make hub      the Python package as Hugging Face's hub has kernels, in dist/hub/"
	@echo "make deb      Debian packages of the library, its headers and the program, in dist/deb/"
	@echo "make release  source archive, Python wheels and their SHA-256 sums, in dist/"
	@echo "make aarch64  the CPU backend and the program for Arm64, tried in qemu"
	@echo "make clean    remove the builds; make distclean: the downloaded compiler too"

setup:
	@scripts/setup.sh

setup-here:
	@$(if $(filter OFF,$(kernels)),echo "the CPU backend alone$(if $(FLASH3_HOPPER),,: no NVIDIA GPU here (FLASH3_HOPPER=ON builds the GPU kernels all the same))")
	@FLASH3_HOPPER=$(kernels) scripts/setup.sh

setup-python:
	@FLASH3_HOPPER=$(kernels) scripts/setup.sh test

setup-gates:
	@scripts/setup.sh gates

build: setup-here
	@cmake --preset release $(here_args)
	@cmake --build --preset release

run: setup-here
	@cmake --preset release $(here_args)
	@cmake --build --preset release --target flash3_run
	build/release/bin/flash3_run run --input $(INPUT) --check

# With a GPU also the kernels of --ablation, --ceiling and trace, which everything else leaves out.
bench: setup-here
	@cmake --preset release $(here_args) $(if $(filter-out OFF,$(kernels)),-DFLASH3_BENCH_KERNELS=ON)
	@cmake --build --preset release --target flash3
	$(flash3) bench

# What needs no Python is built while setup-python, which mostly waits and unpacks, brings one.
test: setup-here
	@$(MAKE) --no-print-directory -j2 setup-python build-without-python
	@cmake --preset test $(here_args)
	@cmake --build --preset test
	ctest --preset test

build-without-python:
	@cmake --preset test $(here_args) -DFLASH3_PYTHON=OFF
	@cmake --build --preset test

# Kernels are built here if make test has not. Where it has, its tests are not run again; where not, those in which kernels change
# nothing (the label cpu) are not.
check: test setup-gates
	@cmake --preset check -DFLASH3_HOPPER=$(or $(FLASH3_HOPPER),AUTO) $(options)
	@cmake --build --preset check
	ctest --preset check $(if $(filter-out OFF,$(kernels)),-L '^check$$')

# With another torch than scripts/requirements-python.txt has: TORCH=2.15.0, and WHEEL=FILE instead of the package in build/release.
test-torch:
	@scripts/test_torch.sh

fuzz:
	@scripts/setup.sh fuzz
	@cmake --preset fuzz $(CMAKE_ARGS)
	@cmake --build --preset fuzz
	@fuzz/run.sh

docs:
	@scripts/setup.sh docs
	@docs/build.sh

format: setup-gates
	@python3 tests/gates/check_style.py --fix

tidy: setup-gates
	@cmake --preset ci $(configure_args)
	@python3 tests/gates/check_style.py --all --build build/ci

PREFIX ?= /usr/local
install: build
	cmake --install build/release --prefix $(PREFIX)

hub: setup-gates
	@cmake --preset release -B build/hub -DFLASH3_CLI=OFF -DFLASH3_EXAMPLES=OFF -DFLASH3_SHARED=OFF -DFLASH3_MANYLINUX=ON \
	       $(configure_args) -DFLASH3_PYTHON=ON -DFLASH3_HUB=ON
	@cmake --build build/hub
	@rm -rf dist/hub
	@cmake --install build/hub --component hub --prefix dist/hub

deb:
	@scripts/setup.sh deb
	@cmake --preset release -B build/deb -DCMAKE_INSTALL_PREFIX=/usr -DFLASH3_DEB=ON -DFLASH3_EXAMPLES=OFF -DFLASH3_TVM_FFI=OFF \
	       $(configure_args)
	@cmake --build build/deb
	@scripts/deb.sh

release:
	@scripts/setup.sh release
	@scripts/release.sh

aarch64:
	@scripts/setup.sh aarch64
	@scripts/aarch64.sh

clean:
	rm -rf build/release build/dev build/cpu-only build/ci build/fuzz build/docs build/hub build/aarch64 build/deb build/sdist

distclean:
	rm -rf build dist
