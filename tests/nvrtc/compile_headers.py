#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NVRTC compiles every device header on its own, and one kernel of every family: so no header needs another included
first, the host's standard library, or anything of nvcc's."""
import argparse
import ctypes
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SRC = ROOT / "src"


def device_headers():
    headers = sorted((SRC / "cuda").rglob("*.cuh"))
    if not headers:
        raise SystemExit("no device header in src/cuda: the gate looks in the wrong place")
    return headers


def one_kernel_of_each_family(build):
    kernels = [min(folder.glob("*.cu")) for src in (SRC, build / "src") for folder in src.glob("cuda/sm90/*/instances")]
    if not kernels:
        raise SystemExit(f"no kernel in {build}/src/cuda/sm90/*/instances: the gate looks in the wrong place")
    return kernels


def with_one_kernel(file):
    """The text of a file of kernels up to the first of them: the others are the same templates, and take seconds each."""
    before, instance, _ = re.split(r"^(FLASH3_\w*INSTANCE\(.*\))$", file.read_text(encoding="utf-8"), maxsplit=1, flags=re.M)
    return before + instance + "\n"


class Nvrtc:
    def __init__(self, path):
        try:
            for builtins in pathlib.Path(path).parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins))  # NVRTC opens it by its name alone, and finds it if it is loaded
            self.lib = ctypes.CDLL(path)
        except OSError as error:
            raise SystemExit(f"cannot load NVRTC: {error}; scripts/setup.sh gates brings it") from error
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *args):
        code = getattr(self.lib, name)(*args)
        if code:
            raise SystemExit(f"{name}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def version(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, name, source, options):
        """(whether it compiled, what NVRTC said)"""
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        code = self.lib.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        self.call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.call("nvrtcGetProgramLog", program, log)
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        return code == 0, log.value.decode(errors="replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvrtc", required=True, help="libnvrtc.so")
    parser.add_argument("--toolkit-include", required=True, help="the folder of cuda_runtime_api.h")
    parser.add_argument("--build", required=True, type=pathlib.Path, help="the folder where CMake wrote the kernels and wgmma's lists")
    args = parser.parse_args()

    nvrtc = Nvrtc(args.nvrtc)
    includes = [SRC, args.build / "src", ROOT / "include", args.toolkit_include]
    # Host constexpr functions (the tile table) carry no __device__: NVRTC knows no host, so it has to be told.
    options = ["--gpu-architecture=sm_90a", "-std=c++20", "--device-as-default-execution-space"]
    options += [f"-I{path}" for path in includes]
    failed = 0
    headers, kernels = device_headers(), one_kernel_of_each_family(args.build)
    files = {header.relative_to(SRC).as_posix(): f'#include "{header.relative_to(SRC).as_posix()}"\n' for header in headers}
    files.update((kernel.as_posix(), with_one_kernel(kernel)) for kernel in kernels)
    for name, source in files.items():
        compiled, log = nvrtc.compile("gate.cu", source, options)
        print(f"{'ok    ' if compiled else 'FAILED'} {name}")
        if log.strip():
            print(log)
        failed += not compiled
    print(f"NVRTC {nvrtc.version()}: {len(files) - failed} of {len(files)} files compiled")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
