# SPDX-License-Identifier: Apache-2.0
"""The build for Hugging Face's hub, loaded by their package `kernels` from a folder, beside the package flash3 itself.

FLASH3_HUB_BUILD is the CMake build folder that it is installed from.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

import flash3

BUILD = os.environ.get("FLASH3_HUB_BUILD")
kernels = pytest.importorskip("kernels", reason="Hugging Face's package kernels is not installed")
if not BUILD:
    pytest.skip("FLASH3_HUB_BUILD does not name a build folder with FLASH3_HUB=ON", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([os.environ.get("CMAKE_COMMAND", "cmake"), "--install", BUILD, "--component", "hub", "--prefix", folder], check=True,
                   stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def variant(folder):
    variant, = (folder / "build").iterdir()
    return variant


@pytest.fixture(scope="module")
def kernel(folder, variant):
    """The module. A build for CUDA runs on CPUs too, but is only found there by its own folder."""
    for_cuda = "-cpu-" not in variant.name
    return kernels.get_local_kernel(variant) if for_cuda and torch.version.cuda is None else \
        kernels.get_local_kernel(folder, backend=None if for_cuda else "cpu")


def make(**options):
    torch.manual_seed(0)
    return [torch.randn(2, 33, heads, 32, **options) for heads in (4, 2, 2)]


def test_what_kernels_looks_for(folder, variant):
    """The name of the variant and what metadata.json says, as the package reads them."""
    from packaging.version import Version

    from kernels import backends, variants
    parsed = variants.parse_variant(variant.name)
    assert parsed.variant_str == variant.name and isinstance(parsed.framework, variants.TorchStableAbi)
    machine = os.uname().machine
    on_cpu = isinstance(parsed.arch.backend, backends.CPU)

    def found(torch_version, backend):
        return variants._resolve_variant_for_system([parsed], backend, machine, "linux", Version(torch_version), True, None)[0] == [parsed]

    here = parsed.arch.backend
    assert found("2.10", here) and found("2.13", here) and found("3.0", here) and not found("2.9", here)
    if not on_cpu:
        newer = backends.CUDA(Version(f"{here.version.major}.{here.version.minor + 1}"))
        assert found("2.13", newer) and not found("2.13", backends.CPU())
    metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
    assert metadata.name.python_name == "flash3" and metadata.license == "Apache-2.0" and metadata.python_depends == []
    assert metadata.backend.archs == (None if on_cpu else ["9.0a"])
    assert re.fullmatch(rf"flash3_{'cpu' if on_cpu else 'cuda'}_[0-9a-f]{{10}}", metadata.id)
    assert {p.name for p in folder.iterdir()} == {"build", "LICENSE", "NOTICE", "flash3.cdx.json"}
    assert not list(folder.rglob("*.pyc"))


def test_is_another_package(kernel, variant):
    assert kernel.__name__ == kernels.Metadata.read_from_file(variant / "metadata.json").id
    assert kernel is not flash3 and kernel.attention is not flash3.attention and kernel.version() == flash3.version()
    assert pathlib.Path(kernel.__file__).parent == variant
    assert all(hasattr(kernel, name) for name in flash3.__all__)
    # Its operators have its name, and its libraries are not flash3's.
    name = kernel.__name__
    for operator in ("forward", "backward", "inference", "attention_with_kv_cache"):
        assert hasattr(getattr(torch.ops, name), operator) and hasattr(torch.ops.flash3, operator)
    assert kernel._attention._eager is not None and kernel._attention._eager is not flash3._attention._eager
    if os.path.exists("/proc/self/maps"):
        mapped = set(re.findall(r"\S+\.so$", pathlib.Path("/proc/self/maps").read_text(), re.M))
        assert {str(variant / f"lib{name}{part}.so") for part in ("", "_torch")} <= mapped
        assert any(path.endswith("/flash3/libflash3.so") for path in mapped)
    if readelf := shutil.which("readelf"):
        text = subprocess.run([readelf, "-d", *variant.glob("*.so")], capture_output=True, text=True, check=True).stdout
        assert set(re.findall(r"\[(lib\w*flash3\w*\.so[^\]]*)\]", text)) == {f"lib{name}.so", f"lib{name}_torch.so"}


def test_results_are_the_same(kernel):
    q, k, v = make()
    assert (kernel.attention(q, k, v, causal=True) == flash3.attention(q, k, v, causal=True)).all()
    gradients = []
    for package in (kernel, flash3):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = package.attention(*leaves, causal=True, return_lse=True, deterministic=True)
        (out.sum() + lse.sum()).backward()
        gradients.append([x.grad for x in leaves])
    assert all((a == b).all() for a, b in zip(*gradients))
    made, wanted = (package.quantize(q, k, v, rotate=True) for package in (kernel, flash3))
    assert all((a.float() == b.float()).all() for a, b in zip(made, wanted))
    used = torch.tensor([5, 30], dtype=torch.int32)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    outs = [package.attention_with_kv_cache(q[:, :2], *cache, seqused_k=used, k_new=k[:, :2], v_new=v[:, :2], causal=True)
            for package, cache in zip((kernel, flash3), caches)]
    assert (outs[0] == outs[1]).all() and (caches[0][0] == caches[1][0]).all()
    with pytest.raises(ValueError, match=r"k.shape\[3\] = 8 but q.shape\[3\] = 32"):
        kernel.attention(q, k[..., :8], v)


def test_compiles(kernel):
    q, k, v = make()
    compiled = torch.compile(lambda *x: kernel.attention(*x, causal=True), fullgraph=True, backend="aot_eager")
    assert (compiled(q, k, v) == flash3.attention(q, k, v, causal=True)).all()


def test_needs_no_flash3_and_leaves_it_be(variant):
    """In a process of its own, where the kernel comes first."""
    code = f"""
        import sys, torch, kernels, pathlib
        one = kernels.get_local_kernel(pathlib.Path({str(variant)!r}))
        assert "flash3" not in sys.modules and not hasattr(torch.ops.flash3, "forward")
        x = torch.randn(1, 5, 2, 16)
        assert torch.isfinite(one.attention(x, x, x)).all()
        import flash3
        assert (flash3.attention(x, x, x) == one.attention(x, x, x)).all()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_gpu(kernel):
    q, k, v = make(dtype=torch.bfloat16, device="cuda")
    assert (kernel.attention(q, k, v, causal=True) == flash3.attention(q, k, v, causal=True)).all()
