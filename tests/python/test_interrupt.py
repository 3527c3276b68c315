# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C during a call on the CPU that takes long."""
import importlib.util
import subprocess
import sys

import pytest

eager = pytest.mark.skipif(importlib.util.find_spec("flash3._eager") is None, reason="built without Python's headers")

# The signal comes in the call, since the thread that sends it waits until the call has written something; the call has ended early if
# rows are left. Without an end it would compute for minutes.
INTERRUPTED = """if True:
    import os, signal, threading
    import torch, flash3
    torch.set_num_threads(1)
    x = torch.randn(1, 60000, 8, 128)
    out = torch.zeros_like(x)

    def interrupt():
        while not out.any():
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        {call}
    except KeyboardInterrupt:
        assert (out == 0).all(-1).any(), "the call has run to its end"
        print("interrupted")
    y = x[:, :50]
    torch.testing.assert_close(flash3.attention(y, y, y), torch.nn.functional.scaled_dot_product_attention(
        *(y.transpose(1, 2),) * 3).transpose(1, 2))  # all is as before
"""
CALLS = {"operator": "flash3._attention._torch.operators.forward_out(x, x, x, out, None); flash3.backends()",
         "arrays": "flash3.arrays.forward(x, x, x, out, num_threads=1)",
         "gradients": "flash3._attention._torch.operators.backward_out(x, None, x, x, x, x, torch.zeros(1, 8, 60000), torch.empty_like(x), "
                      "out, torch.empty_like(x), None); flash3.backends()"}


@eager
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_interrupt_ends_a_call(call):
    code = INTERRUPTED.format(call=call if "operators" not in call else f"""try:
            {call}
        except RuntimeError as error:
            assert "flash3: cancelled" in str(error)
            flash3.backends()""")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout == "interrupted\n", ran.stdout + ran.stderr
