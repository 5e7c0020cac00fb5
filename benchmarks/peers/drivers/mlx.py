"""mlx-lm's gated delta rule on MLX's CPU device: one compiled step per token, as its models run without Metal."""

import importlib.metadata
import importlib.util

import mlx.core as mx
import numpy as np

VERSION = importlib.metadata.version("mlx")
WORK = ["forward", "decoding"]

# The file alone: the package imports transformers.
_file = importlib.metadata.distribution("mlx-lm").locate_file("mlx_lm/models/gated_delta.py")
_spec = importlib.util.spec_from_file_location("gated_delta", _file)
gated_delta = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gated_delta)
mx.set_default_device(mx.cpu)


def prepare(work, arrays, threads):  # threads: the process is limited to that many processors
    B, _, H, D = arrays["q"].shape
    q, k, v, beta = (mx.array(arrays[name]) for name in ("q", "k", "v", "beta"))
    state = arrays["state"].swapaxes(2, 3) if work == "decoding" else np.zeros((B, H, D, D), np.float32)
    state = mx.array(np.ascontiguousarray(state))  # [B, H, V, K]
    # Its callers scale q and exponentiate the gate.
    q, decay = q * D**-0.5, mx.exp(mx.array(arrays["log_gate"]))
    mx.eval(q, k, v, beta, decay, state)

    def call():
        results = gated_delta.gated_delta_ops(q, k, v, decay, beta, state)
        mx.eval(*results)
        return results

    def read(results):
        o, final = (np.array(x) for x in results)
        return {"o": o, **({"state": final.swapaxes(2, 3)} if work == "decoding" else {})}

    return call, read
