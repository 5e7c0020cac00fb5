"""This project's kernels, through the public function."""

import torch_calls

import efla

VERSION = efla.__version__
WORK = torch_calls.ALL_WORK


def prepare(work, arrays, threads):
    def call(*tensors):
        *inputs, state = tensors
        options = {} if state is None else {"initial_state": state, "output_final_state": True, "inplace_state": True}
        return efla.linear_attention(*inputs, rule="gated_delta", backend="native", **options)

    return torch_calls.prepare(call, work, arrays, threads)
