"""The torch functions of transformers' Qwen3-Next, which run where its CUDA kernels are missing."""

import torch_calls
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

VERSION = transformers.__version__
WORK = torch_calls.ALL_WORK


def prepare(work, arrays, threads):
    def call(q, k, v, beta, log_gate, state):
        if work == "decoding":
            return qwen.torch_recurrent_gated_delta_rule(
                q, k, v, log_gate, beta, initial_state=state, output_final_state=True
            )
        return qwen.torch_chunk_gated_delta_rule(q, k, v, log_gate, beta)

    return torch_calls.prepare(call, work, arrays, threads)
