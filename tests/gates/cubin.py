# SPDX-License-Identifier: Apache-2.0
"""Kernels in compiled objects: their launch bounds and instructions, out of the sections of the objects' cubins.

nvdisasm takes a third of a second to start, whatever it reads; so one run reads the code of all kernels, laid one behind the other.
"""
import pathlib
import re
import struct
import subprocess
import tempfile

EIATTR_MAX_THREADS = 5
SIZED = 4  # the form of an attribute of .nv.info that has a size and a value


def run(program, *args, folder=None):
    try:
        return subprocess.run([program, *args], capture_output=True, text=True, check=True, cwd=folder).stdout
    except OSError as error:
        raise SystemExit(f"cannot run {program}: {error}; scripts/setup.sh gates brings it") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{program} {' '.join(args)}: {error.stderr}") from error


def sections(cubin):
    """{name: bytes} of an ELF64 file's sections that have contents."""
    table, = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_size) for i in range(count)]
    no_bits = 8
    contents = [b"" if kind == no_bits else cubin[at:at + size] for _, kind, _, _, at, size in headers]
    names = contents[names_at]
    return {names[name:names.index(b"\0", name)].decode(): data for (name, *_), data in zip(headers, contents)}


def sections_of(obj, cuobjdump):
    """The sections of all cubins in an object."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        run(str(pathlib.Path(cuobjdump).absolute()), "-xelf", "all", str(obj.absolute()), folder=folder)
        for cubin in sorted(pathlib.Path(folder).iterdir()):
            found.update(sections(cubin.read_bytes()))
    return found


def launch_bounds(found):
    """{kernel: threads} of the kernels that have a bound, from the sections of their object."""
    bounds = {}
    for name, info in found.items():
        at = 0
        while name.startswith(".nv.info.") and at < len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            if (form, attribute) == (SIZED, EIATTR_MAX_THREADS):
                x, y, z = struct.unpack_from("<3I", info, at + 4)
                bounds[name.removeprefix(".nv.info.")] = x * y * z
            at += 4 + (size if form == SIZED else 0)
    return bounds


def instructions_of(objects, cuobjdump, nvdisasm):
    """{object: {kernel: [instruction, …]}}, predicates stripped."""
    code, first = bytearray(), []  # where each kernel begins
    by_object = {obj: {} for obj in objects}
    for obj in objects:
        for name, data in sections_of(obj, cuobjdump).items():
            if name.startswith(".text."):
                first.append((len(code), by_object[obj].setdefault(name.removeprefix(".text."), [])))
                code += data
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        text = run(nvdisasm, "--binary", "SM90a", "--no-dataflow", file.name)
    next_kernel, current, end = iter(first), None, 0
    ends = iter([at for at, _ in first[1:]] + [len(code)])
    for at, instruction in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", text, re.M):
        while int(at, 16) >= end:
            (_, current), end = next(next_kernel), next(ends)
        current.append(instruction)
    return by_object
