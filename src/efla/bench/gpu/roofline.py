"""Throughput's upper bound from bytes moved and the GPU's published bandwidth, and whether bytes are what bounds it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Published peaks: bytes per second of its memory, and bfloat16 operations per second without sparsity."""

    name: str
    bandwidth: float
    flops: float


GPUS = (Gpu("A100 80 GB SXM", 2.039e12, 312e12), Gpu("H100 80 GB SXM", 3.35e12, 989e12))

CHUNK = 64


def forward_flops(width: int) -> float:
    """Operations per token and head of the chunked delta rule, K = V = width, chunks of C = 64 tokens.

    K K^T, then W and U from K and V, then W S, K^T X, Q S, and Q K^T with the sum over the chunk:

        2 C K + 2 C (K + V) + 6 K V + 2 C (K + V)
    """
    return 2 * CHUNK * width + 4 * CHUNK * width + 6 * width * width + 4 * CHUNK * width


def tokens_per_second(bytes_per_token: float, gpu: Gpu) -> float:
    """Tokens and heads per second if memory were used at its full bandwidth and nothing else took time."""
    return gpu.bandwidth / bytes_per_token


def is_memory_bound(bytes_per_token: float, flops_per_token: float, gpu: Gpu) -> bool:
    """Whether moving the bytes takes longer than doing the operations, both at their peaks."""
    return bytes_per_token / gpu.bandwidth > flops_per_token / gpu.flops
