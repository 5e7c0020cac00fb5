"""flash-linear-attention's naive functions: its kernels need a GPU. Its package is not imported, which needs triton."""

import importlib.metadata
import importlib.util

import torch_calls

VERSION = importlib.metadata.version("fla-core")
WORK = torch_calls.ALL_WORK

_file = importlib.metadata.distribution("fla-core").locate_file("fla/ops/gated_delta_rule/naive.py")
_spec = importlib.util.spec_from_file_location("naive", _file)
naive = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(naive)


def prepare(work, arrays, threads):
    def call(q, k, v, beta, log_gate, state):
        if work == "decoding":
            return naive.naive_recurrent_gated_delta_rule(
                q, k, v, beta, log_gate, initial_state=state, output_final_state=True
            )
        return naive.naive_chunk_gated_delta_rule(q, k, v, log_gate, beta)

    return torch_calls.prepare(call, work, arrays, threads)
