# SPDX-License-Identifier: Apache-2.0
# make run and make test work from a bare clone; both bring what they need first (scripts/setup.sh).
# CMake does the building: see CMakePresets.json.
#
#   FLASH3_HOPPER=OFF    the CPU backend alone; ON: the GPU kernels too where make run and make bench find no GPU
#   FLASH3_CUDA_ROOT=…   your own CUDA toolkit (12.8 or newer) instead of the pinned wheels
#   FLASH3_PYTHON=OFF    without the Python package (make test)
#   CMAKE_ARGS=…         more arguments for the configure step
#   FUZZ_TARGET=…        one fuzz target alone; FUZZ_SECONDS=…: for each (make fuzz)

CMAKE_ARGS ?=
configure_args = $(if $(FLASH3_HOPPER),-DFLASH3_HOPPER=$(FLASH3_HOPPER)) \
                 $(if $(FLASH3_PYTHON),-DFLASH3_PYTHON=$(FLASH3_PYTHON)) $(CMAKE_ARGS)
INPUT ?= data/minilm_layer0.safetensors

# What make run and make bench build: without an NVIDIA GPU (WSL has it as /dev/dxg), and not asked to, no kernels that could
# not run here.
has_gpu := $(wildcard /dev/nvidiactl /dev/dxg)
program_build := build/$(if $(has_gpu)$(filter-out OFF,$(FLASH3_HOPPER)),release,cpu)
flash3 = $(program_build)/bin/flash3

.DEFAULT_GOAL := help
.PHONY: help run test fuzz bench docs build program setup setup-gates build-without-python format tidy install hub deb release aarch64 clean distclean

help:
	@echo "make run      build, then attention on the real input in data/, compared with the oracle"
	@echo "make test     build everything; unit tests, again under sanitizers, gates, install test"
	@echo "make fuzz     the fuzz targets, ten minutes each (FUZZ_SECONDS, FUZZ_TARGET)"
	@echo "make bench    build, then time the case list on this machine"
	@echo "make docs     the documentation as a web site: build/docs/html/index.html"
	@echo "make format   clang-format on every source"
	@echo "make tidy     clang-tidy on every source, also of tools and tests"
	@echo "make install  build, then install to PREFIX (default /usr/local)"
	@echo "make hub      the Python package as Hugging Face's hub has kernels, in dist/hub/"
	@echo "make deb      Debian packages of the library, its headers and the program, in dist/deb/"
	@echo "make release  source archive, Python wheels and their SHA-256 sums, in dist/"
	@echo "make aarch64  the CPU backend and the program for Arm64, tried in qemu"
	@echo "make clean    remove the builds; make distclean: the downloaded compiler too"

setup:
	@scripts/setup.sh

setup-gates:
	@scripts/setup.sh gates

build: setup
	@cmake --preset release $(configure_args)
	@cmake --build --preset release

ifeq ($(program_build),build/cpu)
program:
	@echo "no NVIDIA GPU here: building the CPU backend alone (make run FLASH3_HOPPER=ON: the GPU's kernels too)"
	@FLASH3_HOPPER=OFF scripts/setup.sh
	@cmake --preset release -B $(program_build) $(configure_args) -DFLASH3_HOPPER=OFF
	@cmake --build $(program_build) --target flash3
else
program: setup
	@cmake --preset release $(configure_args) $(bench_args)
	@cmake --build --preset release --target flash3
endif

run: program
	$(flash3) run --input $(INPUT) --check

# With a GPU also the kernels of --ablation, --ceiling and trace, which make run and make build leave out.
bench: bench_args = -DFLASH3_BENCH_KERNELS=ON
bench: program
	$(flash3) bench

# What needs no Python is built while setup-gates, which mostly waits and unpacks, brings one.
test:
	@scripts/setup.sh tools
	@$(MAKE) --no-print-directory -j2 setup-gates build-without-python
	@cmake --preset ci $(configure_args)
	@cmake --build --preset ci
	ctest --preset ci

build-without-python:
	@cmake --preset ci $(configure_args) -DFLASH3_PYTHON=OFF
	@cmake --build --preset ci

fuzz:
	@scripts/setup.sh fuzz
	@cmake --preset fuzz $(CMAKE_ARGS)
	@cmake --build --preset fuzz
	@fuzz/run.sh

docs:
	@scripts/setup.sh docs
	@docs/build.sh

format: setup-gates
	@python3 tests/gates/check_format.py --fix

tidy: setup-gates
	@cmake --preset ci $(configure_args)
	@python3 tests/gates/check_clang_tidy.py --all --build build/ci

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
	rm -rf build/release build/cpu build/dev build/cpu-only build/ci build/fuzz build/docs build/hub build/aarch64 build/deb build/sdist

distclean:
	rm -rf build dist
