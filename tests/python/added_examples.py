# SPDX-License-Identifier: Apache-2.0
"""Tensors that the C headers have gained, in each of their shapes: what tests of all bindings give a call."""
import numpy as np

from flash3._fields import ADDED


def examples(name, batch, heads_q, seq_q, seq_k):
    """{shape: array of float32} of a tensor that a call reads, without those of rows and of a state."""
    def sizes(shape):
        if shape == "heads":
            return (heads_q,)
        if shape == "batch_heads":
            return batch, heads_q
        if shape.endswith("d"):
            return heads_q if "h" in shape else 1, 11
        return batch if "b" in shape else 1, heads_q if "h" in shape else 1, seq_q if "q" in shape else 1, seq_k
    made = {shape: sizes(shape) for shape in ADDED["forward"][name].split() if shape not in ("rows", "state")}
    # Not in order: what is added to all scores of a row alike changes nothing.
    return {shape: np.random.default_rng(7).permutation(np.linspace(0.01, 0.5, int(np.prod(size)), dtype=np.float32)).reshape(size)
            for shape, size in made.items()}
