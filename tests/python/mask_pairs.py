# SPDX-License-Identifier: Apache-2.0
"""What tests of masks compare with: booleans pair by pair."""
import pytest
import torch

from flash3 import _mask_rows


def pairs(batch, heads, seq_q, seq_k, sees):
    """[batch, heads, seq_q, seq_k] bool of a function of four numbers."""
    return torch.tensor([[[[bool(sees(b, h, i, j)) for j in range(seq_k)] for i in range(seq_q)] for h in range(heads)] for b in range(batch)],
                        dtype=torch.bool).view(batch, heads, seq_q, seq_k)


def check(source, wanted, device="cpu"):
    got = source.to_dense(*wanted.shape)
    assert got.shape == wanted.shape and got.device.type == device
    assert torch.equal(got.cpu(), wanted), (got.cpu() != wanted).nonzero()[:5].tolist()


def scattered(b, h, q, k):
    return (q * 7 + k * 13) % 5 < 2


@pytest.fixture
def small_parts(monkeypatch):
    """Rows are made and read a block at a time."""
    monkeypatch.setattr(_mask_rows, "AT_ONCE", 1)
