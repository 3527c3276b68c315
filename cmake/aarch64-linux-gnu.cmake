# SPDX-License-Identifier: Apache-2.0
# Builds for Arm64 on another machine, with Debian's cross compiler; programs, those of configure steps and tests too, run in qemu
# (scripts/aarch64.sh). What the program takes beside the C++ library is headers alone, so that the packages of this machine serve.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Its CMake files name a library of this machine too, which is never linked.
file(GLOB fmt_DIR /usr/lib/*-linux-gnu/cmake/fmt)
