# SPDX-License-Identifier: Apache-2.0
"""install() of the adapters for serving engines: an engine's own imports find flash3."""
import subprocess
import sys
import textwrap

import pytest

VLLM = {
    "vllm/__init__.py": "",
    "vllm/platforms.py": """
        class current_platform:
            def get_device_capability():
                return capability
        """,
    "vllm/vllm_flash_attn/__init__.py": "raise AssertionError('the engine imported its own')",
    "vllm/vllm_flash_attn/layers/__init__.py": "",
    "vllm/vllm_flash_attn/layers/rotary.py": "from vllm.vllm_flash_attn import flash_attn_varlen_func; apply_rotary_emb = 1",
    "vllm/fa_utils.py": """
        from vllm.vllm_flash_attn import (compile_flash_attn_varlen_func_from_specs, flash_attn_varlen_func,
                                          get_scheduler_metadata)
        from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason, is_fa_version_supported
        from vllm.vllm_flash_attn.layers.rotary import apply_rotary_emb
        import vllm.vllm_flash_attn as whole
        from vllm import vllm_flash_attn as again
        assert again is whole and whole.flash_attn_varlen_func is flash_attn_varlen_func
        """,
}
SGLANG = {
    "sgl_kernel/__init__.py": "from sgl_kernel.elementwise import silu",
    "sgl_kernel/elementwise.py": "silu = 1",
    "sgl_kernel/flash_attn.py": "raise AssertionError('the engine imported its own')",
    "sglang/__init__.py": "",
    "sglang/backend.py": """
        from sgl_kernel import silu
        from sgl_kernel.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
        """,
}


def run(tmp_path, files, script):
    """Runs a script in a Python of its own, with an engine whose modules are these."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(script)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_vllm_finds_flash3(tmp_path):
    assert run(tmp_path, VLLM, """
        import flash3.integrations.vllm as ours
        ours.install()
        ours.install()
        assert "vllm" not in sys.modules
        import vllm.fa_utils as theirs, vllm.platforms
        assert all(getattr(theirs, name) is getattr(ours, name) for name in (
            "flash_attn_varlen_func", "get_scheduler_metadata", "is_fa_version_supported", "fa_version_unsupported_reason"))
        assert theirs.apply_rotary_emb == 1
        for vllm.platforms.capability in ((9, 0), (8, 0), None):
            for version in (2, 3, 4):
                print(theirs.is_fa_version_supported(version))
        print(theirs.fa_version_unsupported_reason(3).replace(" ", "_"))
        """) == ["True", "True", *["False"] * 7, "flash3_needs_a_GPU_of_compute_capability_9.0,_and_vLLM's_platform_has_none"]


def test_sglang_finds_flash3(tmp_path):
    assert run(tmp_path, SGLANG, """
        import flash3.integrations.sglang as ours
        ours.install()
        import sglang.backend as theirs
        print(theirs.flash_attn_with_kvcache is ours.flash_attn_with_kvcache)
        print(theirs.flash_attn_varlen_func is ours.flash_attn_varlen_func)
        """) == ["True", "True"]


@pytest.mark.parametrize("engine,module,files", [("vllm", "vllm.vllm_flash_attn", VLLM),
                                                 ("sglang", "sgl_kernel.flash_attn", SGLANG)])
def test_an_engine_that_has_imported_its_own(tmp_path, engine, module, files):
    own = module.replace(".", "/")
    files = {**files, f"{own}/__init__.py" if f"{own}/__init__.py" in files else f"{own}.py": "mine = 1"}
    assert run(tmp_path, files, f"""
        import {module}
        import flash3.integrations.{engine} as ours
        try:
            ours.install()
        except RuntimeError as error:
            print(str(error).replace(" ", "_"))
        assert sys.modules["{module}"].mine == 1
        """) == [f"{module}_is_imported_already_but_flash3.integrations.{engine}.install()_puts_another_module_in_its_place;_"
                 f"call_it_before_anything_imports_{module.partition('.')[0]}"]
