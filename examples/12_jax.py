# SPDX-License-Identifier: Apache-2.0
"""A layer of attention in JAX, trained with flash3 and with jax.nn's own attention, with the batch distributed to all devices.

    FLASH3_JAX=ON pip install . && pip install jax        (jax[cuda13] on a Hopper GPU)
    python examples/12_jax.py

It learns which token occurs most often in a prefix. Checks itself: both must learn, and their losses may differ by 1 %.
"""
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from flash3.jax import dot_product_attention

BATCH, SEQ, HEADS, DIM, TOKENS, STEPS = 8, 64, 4, 16, 12, 40
DTYPE = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
devices = max(n for n in range(1, jax.device_count() + 1) if BATCH % n == 0)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("batch",))


def train(attention):
    # XLA does not know how to split the call, so shard_map says it: by the batch.
    sharded = jax.shard_map(lambda q, k, v: attention(q, k, v, is_causal=True), mesh=mesh, in_specs=P("batch"), out_specs=P("batch"))

    def loss(weights, tokens, most):
        x = weights["embed"][tokens]
        q, k, v = ((x @ weights[name]).reshape(*tokens.shape, -1, DIM).astype(DTYPE) for name in "qkv")
        out = sharded(q, k, v).astype(jnp.float32).reshape(x.shape)
        return -jnp.take_along_axis(jax.nn.log_softmax(out @ weights["embed"].T), most[..., None], -1).mean()

    shapes = {"embed": (TOKENS, HEADS * DIM), "q": (HEADS * DIM,) * 2, "k": (HEADS * DIM, HEADS * DIM // 2),
              "v": (HEADS * DIM, HEADS * DIM // 2)}  # half as many KV heads
    keys = jax.random.split(jax.random.key(0), len(shapes))
    weights = {name: jax.random.normal(key, shape) / 8 for key, (name, shape) in zip(keys, shapes.items())}
    tokens = jax.random.categorical(jax.random.key(1), jnp.linspace(0, 2, TOKENS), shape=(BATCH, SEQ))
    most = jnp.argmax(jnp.cumsum(jax.nn.one_hot(tokens, TOKENS), axis=1), -1)
    step = jax.jit(jax.value_and_grad(loss))
    losses = []
    for _ in range(STEPS):
        value, gradients = step(weights, tokens, most)
        weights = jax.tree.map(lambda w, g: w - g, weights, gradients)
        losses.append(float(value))
    return losses


ours, theirs = train(dot_product_attention), train(jax.nn.dot_product_attention)
apart = max(abs(a - b) / b for a, b in zip(ours, theirs))
print(f"{devices} × {jax.devices()[0].device_kind}: loss {ours[0]:.3f} → {ours[-1]:.3f}, "
      f"with jax.nn {theirs[-1]:.3f}; apart by {100 * apart:.2g} %")
if ours[-1] > 0.7 * ours[0] or apart > 0.01:
    raise SystemExit("the losses should fall, and be alike")
