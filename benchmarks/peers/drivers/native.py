"""This project's kernels, through the public function."""

import torch_calls

import efla

VERSION = efla.__version__
WORK = torch_calls.ALL_WORK


def prepare(work, arrays, threads):
    decodes = work == "decoding"

    def call(q, k, v, beta, log_gate, state):
        return efla.linear_attention(
            q, k, v, beta, log_gate, rule="gated_delta", backend="native", initial_state=state,
            output_final_state=decodes, inplace_state=decodes,
        )  # fmt: skip

    return torch_calls.prepare(call, work, arrays, threads)
