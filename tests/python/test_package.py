# SPDX-License-Identifier: Apache-2.0
"""The wheels: that they build, what is in them, and that they run from where they are installed."""
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
JAX = ["libflash3_jax"] if importlib.util.find_spec("jaxlib") else []
MANYLINUX = platform.machine() == "x86_64" and "clang" not in os.environ.get("CXX", "")  # as make release builds it
HAS_HEADERS = pathlib.Path(sysconfig.get_path("include"), "Python.h").exists()


def build(folder, source, *settings):
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
                    "-w", folder, *(f"--config-settings={setting}" for setting in settings), source], check=True)
    wheel, = pathlib.Path(folder).glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with all wheels installed. The GPU's kernels are left out, since nvcc would take minutes, and the CPU's are not
    optimised. The rest hardly is: with -O1, which compiles in the least time, as what is not inlined at all is more code."""
    site, wheels = tmp_path_factory.mktemp("site"), {}
    for name, source, options in (
            ("flash3", ROOT, ["cmake.define.FLASH3_HOPPER=OFF", f"cmake.define.FLASH3_MANYLINUX={MANYLINUX}",
                              "cmake.define.FLASH3_CPU_KERNEL_OPTIMIZATION=-O0", "cmake.define.CMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
                              f"build-dir={tmp_path_factory.mktemp('build')}"]),
            ("flash3_drop_in", ROOT / "bindings/dropin", []),
            ("flash_attn_3", ROOT / "bindings/dropin/metadata", [])):
        wheels[name] = build(tmp_path_factory.mktemp(name), source, *options)
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site,
                        wheels[name]], check=True)
    return site, wheels


def run(site, code, python=sys.executable):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, "-c", code], env={**environment, "PYTHONPATH": str(site)}, cwd=site,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheels(site):
    _, wheels = site
    header = (ROOT / "include/flash3/version.h").read_text(encoding="utf-8")
    version = re.search(r'FLASH3_VERSION_STRING "(.*)"', header)[1]
    # One for every CPython, and each file in it once.
    assert re.fullmatch(rf"flash3-{re.escape(version)}-py3-none-\w*linux\w*\.whl", wheels["flash3"].name)
    names = zipfile.ZipFile(wheels["flash3"]).namelist()
    eager = ["flash3/_eager.abi3.so"] if HAS_HEADERS else []
    assert sorted(n for n in names if ".so" in n) == [*eager, "flash3/libflash3.so", *(f"flash3/{n}.so" for n in JAX),
                                                         "flash3/libflash3_torch.so"]
    assert all(n.startswith(("flash3/", f"flash3-{version}.dist-info/")) for n in names)
    assert {f"flash3-{version}.dist-info/{n}" for n in ("licenses/LICENSE", "licenses/NOTICE", "sboms/flash3.cdx.json")} <= set(names)
    drop_in = zipfile.ZipFile(wheels["flash3_drop_in"])
    assert [n for n in drop_in.namelist() if n.endswith("/licenses/LICENSE")]
    assert f"Requires-Dist: flash3=={version}" in drop_in.read(f"flash3_drop_in-{version}.dist-info/METADATA").decode().splitlines()
    assert {n.split("/")[0].split("-")[0] for n in drop_in.namelist()} == {
        "flash3_drop_in", "flash_attn_3", "flash_attn_interface.py", "flash_attn_config.py"}
    assert all(".dist-info/" in n for n in zipfile.ZipFile(wheels["flash_attn_3"]).namelist())
    sources = {p.relative_to(ROOT / "bindings/python").as_posix() for p in (ROOT / "bindings/python").rglob("*.py")}
    assert sources <= set(names)
    assert all(wheels[name].name.endswith("-py3-none-any.whl") for name in ("flash3_drop_in", "flash_attn_3"))


def test_links_nothing_of_one_python_or_one_torch(site):
    folder, _ = site
    readelf = shutil.which("readelf")
    if not readelf:
        pytest.skip("there is no readelf")
    needed = {}
    for name in ("libflash3", "libflash3_torch", *JAX, *(["_eager.abi3"] if HAS_HEADERS else [])):
        text = subprocess.run([readelf, "-d", folder / f"flash3/{name}.so"], capture_output=True, text=True, check=True).stdout
        needed[name] = set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))
        assert re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text) in ([], ["$ORIGIN"])
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1",
              "ld-linux-x86-64.so.2"}
    assert needed["libflash3"] <= system
    assert needed["libflash3_torch"] - system == {"libflash3.so", "libtorch_cpu.so"}
    assert needed.get("libflash3_jax", system) - system <= {"libflash3.so"}
    assert needed.get("_eager.abi3", system) - system <= {"libflash3.so"}  # Python's symbols are those of the process


@pytest.mark.skipif(not MANYLINUX or not shutil.which("readelf"), reason="not x86-64 and GCC, or there is no readelf")
def test_runs_on_glibc_2_28_and_gcc_8(site):
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
    libraries = list((site[0] / "flash3").glob("*.so"))
    assert len(libraries) == 2 + HAS_HEADERS + len(JAX)
    for library in libraries:
        text = subprocess.run(["readelf", "--wide", "--version-info", library], capture_output=True, text=True, check=True).stdout
        versions = {(family, tuple(map(int, number.split(".")))) for family, number in re.findall(r"Name: ([A-Z]+)_([\d.]+) ", text)}
        assert {"GLIBC", "GCC"} <= {family for family, _ in versions}
        assert not {v for v in versions if v[0] not in newest or v[1] > newest[v[0]]}, library.name


def test_uses_only_what_torch_2_10_has(site):
    folder, _ = site
    nm = shutil.which("nm")
    if not nm:
        pytest.skip("there is no nm")
    text = subprocess.run([nm, "-D", "--undefined-only", folder / "flash3/libflash3_torch.so"], capture_output=True, text=True,
                          check=True).stdout
    functions = set(re.findall(r" U (\w*torch\w*)$", text, re.M))
    allowed = re.compile(r"aoti_torch_\w+|torch_library_impl|torch_call_dispatcher|torch_get_num_threads|"
                         r"torch_(?:new_list_reserve_size|list_size|list_get_item|list_push_back|delete_list)")
    assert functions and all(allowed.fullmatch(f) for f in functions), sorted(functions)
    # No C++ symbol of torch: those are what differs from release to release.
    assert not re.search(r" U _ZN?K?(2at|3c10|5torch)", text)


@pytest.mark.skipif(not HAS_HEADERS or not shutil.which("nm"), reason="there is no _eager, or no nm")
def test_exports_its_module_alone(site):
    text = subprocess.run(["nm", "-D", site[0] / "flash3/_eager.abi3.so"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r" [^Uwv] (\w+)$", text, re.M) == ["PyInit__eager"]
    assert not re.search(r" U _ZN?K?(2at|3c10|5torch)| U \w*torch", text)


SMOKE = """
import ctypes, flash3
class Array:
    def __init__(self, *shape):
        self.memory = (ctypes.c_float * 48)(*[2.0] * 48)
        self.__array_interface__ = dict(version=3, shape=shape, typestr="<f4", data=(ctypes.addressof(self.memory), False))
q, out = Array(1, 3, 2, 8), Array(1, 3, 2, 8)
out.memory[0] = 5.0
flash3.arrays.forward(q, q, q, out, causal=True)
assert all(abs(x - 2) < 1e-6 for x in out.memory)
print(flash3.version(), flash3.backends()["cpu"])
"""


def pythons():
    for minor in range(10, 16):
        found = shutil.which(f"python3.{minor}")
        works = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
        yield pytest.param(found, id=f"3.{minor}", marks=[] if works else pytest.mark.skip(reason=f"there is no python3.{minor}"))


@pytest.mark.parametrize("python", list(pythons()))
def test_runs_in_every_python(site, python):
    assert "thread" in run(site[0], SMOKE, python)


def test_installed_next_to_torch(site):
    run(site[0], """
import flash3, torch, pathlib, flash_attn_interface, importlib.metadata as m
assert pathlib.Path(flash3.__file__).parent.parent == pathlib.Path.cwd()
x = torch.randn(1, 5, 2, 16, requires_grad=True)
flash_attn_interface.flash_attn_func(x, x, x).sum().backward()
assert x.grad is not None
assert (flash3._torch.eager is not None) == %s
assert {n.replace("_", "-") for n in m.packages_distributions()["flash_attn_interface"]} == {"flash3-drop-in", "flash-attn-3"}
assert m.version("flash-attn-3").startswith("3.") and m.version("flash3") == flash3.__version__
""" % HAS_HEADERS)


def test_transformers_finds_the_drop_in(site):
    run(site[0], """
from unittest import mock
import transformers.utils.import_utils as u
with mock.patch.object(u, "is_torch_cuda_available", return_value=True), mock.patch("torch.cuda.is_available", return_value=True):
    u.is_flash_attn_3_available.cache_clear()
    assert u.is_flash_attn_3_available()
import transformers.modeling_flash_attention_utils as f
assert f.FLASH_ATTENTION_COMPATIBILITY_MATRIX[3]["pkg_availability_check"]()
""")


@pytest.fixture
def pip(tmp_path):
    """pip, in a Python environment of its own, and where that has its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    packages, = tmp_path.glob("venv/lib/python*/site-packages")

    def call(*arguments):
        subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", tmp_path / "venv/bin/python",
                        *arguments], check=True)
    call.packages, call.install = packages, ("install", "--no-deps", "--no-index", "--no-compile")
    return call


@pytest.fixture
def upstream(tmp_path):
    """A wheel with the names of FlashAttention-3's, and nothing else."""
    wheel, info = tmp_path / "flash_attn_3-3.0.0-py3-none-any.whl", "flash_attn_3-3.0.0.dist-info"
    files = {"flash_attn_interface.py": "NAME = 'upstream'", "flash_attn_config.py": "", "flash_attn_3/__init__.py": "",
             "flash_attn_3/_C.abi3.so": "", "flash_attn_3/flash_attn_interface.py": "", "flash_attn_3/flash_attn_config.py": "",
             f"{info}/METADATA": "Metadata-Version: 2.1\nName: flash_attn_3\nVersion: 3.0.0\n",
             f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (*files.items(), (f"{info}/RECORD", "".join(f"{n},,\n" for n in [*files, f"{info}/RECORD"]))):
            archive.writestr(name, text)
    return wheel


def test_the_drop_in_beside_upstreams(site, pip, upstream):
    _, wheels = site
    before = set(pip.packages.iterdir())
    pip(*pip.install, upstream)
    pip(*pip.install, wheels["flash3_drop_in"])
    for module in ("flash_attn_interface", "flash_attn_3"):
        code = f"""
import sys; sys.path[:0] = [{str(pip.packages)!r}]
try:
    import {module}
except ImportError as error:
    assert "pip uninstall flash_attn_3 flash3-drop-in" in str(error), error
else:
    raise AssertionError
"""
        run(site[0], code)
    pip("uninstall", "--yes", "flash_attn_3", "flash3-drop-in")
    assert set(pip.packages.iterdir()) == before


def test_the_name_takes_the_place_of_upstreams(site, pip, upstream):
    _, wheels = site
    before = set(pip.packages.iterdir())
    pip(*pip.install, upstream)
    pip(*pip.install, wheels["flash_attn_3"])  # pip exchanges what has one name
    assert not (pip.packages / "flash_attn_interface.py").exists()
    pip(*pip.install, wheels["flash3_drop_in"])
    run(pip.packages, f"import sys; sys.path.append({str(site[0])!r}); import flash_attn_interface as f; assert f.flash_attn_func")
    pip("uninstall", "--yes", "flash3-drop-in")
    assert {p.name for p in set(pip.packages.iterdir()) - before} <= {"flash_attn_3-3.0.0+flash3.dist-info", "__pycache__"}
    pip("uninstall", "--yes", "flash_attn_3")
    assert {p.name for p in set(pip.packages.iterdir()) - before} <= {"__pycache__"}
