#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NVRTC compiles every device header on its own, and one kernel of every family: so no header needs another included
first, the host's standard library, or anything of nvcc's. What a kernel lacks a policy for does not compile."""
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
    """The text of a file of kernels with the first row of them alone: the others are the same templates, and take seconds each."""
    text = file.read_text(encoding="utf-8")
    instances = re.findall(r"^template const void\* kernel_function<.*\n", text, flags=re.M)
    if not instances:
        raise SystemExit(f"{file} instantiates no kernel as this gate knows it")
    for instance in instances[1:]:
        text = text.replace(instance, "")
    return text


FIRST_ROW = """
#include "cuda/sm90/forward/kernel_16bit.cuh"
#include "cuda/sm90/forward/kernel_params.h"
#include "cuda/sm90/forward/tile_table.hpp"
#include "cuda/sm90/device/instance.cuh"
namespace flash3::cuda::sm90 {
// The first row of 16-bit operands with or without pages and a softcap.
constexpr int first_row(bool paged, ScoreKind score) {
  int row = 0;
  while (kForwardConfigs[row].operands != Operands::k16Bit || kForwardConfigs[row].paged != paged ||
         kForwardConfigs[row].split || kForwardConfigs[row].score != score)
    ++row;
  return row;
}
constexpr int first_listed_row() {
  int row = 0;
  while (!kForwardConfigs[row].lists) ++row;
  return row;
}
"""
# Sources, and what NVRTC must say of them; "": they compile. Each has the policies of a plain 16-bit kernel alone.
POLICIES = {
    "a plain row": ("template const void* kernel_function<kForwardConfigs, first_row(false, ScoreKind::kPlain)>(Element);", ""),
    "a row without its loader": ("template const void* kernel_function<kForwardConfigs, first_row(true, ScoreKind::kPlain)>(Element);",
                                 "ProducerFor"),
    "a row without its lists": ("template const void* kernel_function<kForwardConfigs, first_listed_row()>(Element);", "incomplete type"),
    "a row without its scores": ("template const void* kernel_function<kForwardConfigs, first_row(false, ScoreKind::kSoftcap)>(Element);",
                                 "incomplete type"),
    "a row without any policy": ("template const void* kernel_function<kForwardConfigs, kRowsOf<kForwardConfigs> - 1>(Element);",
                                 "incomplete type"),
    "a consumer without a step": ("""
constexpr ForwardConfig kRow = kForwardConfigs[first_row(false, ScoreKind::kPlain)].compiled();
using Plain = PoliciesOf<kRow, Element::kFloat16>;
struct Incomplete : Plain {
  struct Consumer : Plain::Consumer {
    using Plain::Consumer::Consumer;
    void run_softmax(int) {}
  };
};
inline const void* kernel() { return reinterpret_cast<const void*>(&forward_kernel<Incomplete>); }
""", "ConsumerFor"),
}


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
    for name, (source, complaint) in POLICIES.items():
        compiled, log = nvrtc.compile("gate.cu", f"{FIRST_ROW}{source}\n}}\n", options)
        right = compiled if not complaint else not compiled and complaint in log
        print(f"{'ok    ' if right else 'FAILED'} {name}")
        if not right:
            print(log or "it compiled")
        failed += not right
    print(f"NVRTC {nvrtc.version()}: {failed} of {len(files) + len(POLICIES)} are not as they must be")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
