# SPDX-License-Identifier: Apache-2.0
"""The Hopper backend's compiled objects, and the logs that nvcc left beside them."""
import pathlib
import re
import struct
import subprocess
import tempfile
from collections import Counter


def read_objects(listed):
    objects = [pathlib.Path(line) for line in listed.read_text(encoding="utf-8").split()]
    if not objects:
        raise SystemExit("no CUDA object in the build: the gate looks in the wrong place")
    return objects


def log_of(obj):
    """What nvcc said when it made this object (cmake/nvcc_logged.sh)."""
    log = pathlib.Path(f"{obj}.log")
    if not obj.exists() or not log.exists():
        raise SystemExit(f"{obj} or its .log is not there; build first")
    return log.read_text(encoding="utf-8", errors="replace")


def demangle(name):
    try:
        return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return name


def is_attention(obj):
    """Kernel families keep their kernels in instances/; anything else is a helper (copies, conversions)."""
    return "/instances/" in str(obj)


# Kernels in compiled objects: their launch bounds and instructions, out of the sections of the objects' cubins.
#
# nvdisasm takes a third of a second to start and half a minute for the code of all kernels, which has a thousand times fewer kinds of
# instructions than instructions; so one run reads one of each kind.

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


def kind_of(instruction):
    """What the name of an instruction of 16 bytes depends on: its opcode and modifiers, without registers, predicates and scheduling."""
    low, high = instruction
    return low & 0xFFF, high >> 8 & 0x1FFFFFFFF


def names_of(kinds, nvdisasm):
    """The names, from {kind: an instruction of it}, without predicates and modifiers."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(struct.pack("<QQ", *instruction) for instruction in kinds.values()))
        file.flush()
        text = run(nvdisasm, "--binary", "SM90a", "--no-dataflow", file.name)
    lines = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)", text, re.M)
    if [int(at, 16) for at, _ in lines] != list(range(0, 16 * len(kinds), 16)):
        raise SystemExit(f"{nvdisasm}: not one line for each of {len(kinds)} instructions")
    return dict(zip(kinds, (name for _, name in lines)))


def instructions_of(objects, cuobjdump, nvdisasm):
    """{object: {kernel: {name of instructions: how many}}}."""
    by_object, kinds = {obj: {} for obj in objects}, {}
    for obj in objects:
        for name, code in sections_of(obj, cuobjdump).items():
            if not name.startswith(".text."):
                continue
            count = by_object[obj].setdefault(name.removeprefix(".text."), Counter())
            for instruction in struct.iter_unpack("<QQ", code):
                kind = kind_of(instruction)
                kinds.setdefault(kind, instruction)
                count[kind] += 1
    names = names_of(kinds, nvdisasm)
    for kernels in by_object.values():
        for kernel, count in kernels.items():
            kernels[kernel] = Counter()
            for kind, times in count.items():
                kernels[kernel][names[kind]] += times
    return by_object
