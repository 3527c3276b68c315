# SPDX-License-Identifier: Apache-2.0
import importlib
import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of a GPU's memory, which torch's tests need


def _hopper():
    """None, or why the tests marked `gpu` cannot run."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"{torch.cuda.get_device_name()} is not of compute capability 9.0"
    import flash3
    state = flash3.backends()["hopper"]
    return state if state.startswith("not available") else None


WHY_NO_HOPPER = _hopper()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a Hopper GPU")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and WHY_NO_HOPPER:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {WHY_NO_HOPPER}"))


@pytest.fixture
def script(monkeypatch):
    """A function of a name: that module of bench/, as in script("gpu.peers")."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"bench.{name}")


# One test for each device: those on CUDA are marked gpu.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def assert_hopper_refuses(ask):
    """ask() is a Support. The Hopper backend takes nothing in host memory; where there is none, that is the reason."""
    no = ask()
    assert not no and no.reason
    if not WHY_NO_HOPPER:
        assert "is host memory, which the hopper backend cannot read" in no.reason


class DLPackOnly:
    """Hides all of an array but its DLPack interface."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
