"""Our classifiers and the authors': pixel embedding with positions, one linear-attention mixer, ten logits.

Shapes: B images, T pixels, D = width, H heads of width K = V = D / H.
"""

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import efla
from efla.experiments.smnist.config import ARMS, SmnistConfig
from efla.layers import RMSNorm, ShortConvolution
from efla.models.accounting import parameter_count
from efla.native import rows
from efla.rules import get
from efla.rules.base import StepCoefficients, without_decay
from efla.rules.exact_flow import ExactFlow
from efla.scans.keys import l2_normalize

PARAMETERS = {("bare", 784): 68_298, ("bare", 196): 30_666, ("authors", 784): 63_371}
"""Parameters of every ungated arm with one layer and one head; asserted whenever a model is built."""


class Probe:
    """Collects beta * lam of every token and the time spent in scans."""

    def __init__(self) -> None:
        self.step_sizes: list[Tensor] = []
        self.scan_seconds = 0.0
        self.keep_all = False

    def see(self, step_size: Tensor) -> None:
        self.step_sizes.append(step_size if self.keep_all else step_size.amax())

    def pop(self) -> Tensor:
        """All step sizes since the last call, flattened."""
        seen, self.step_sizes = self.step_sizes, []
        return torch.cat([x.flatten() for x in seen])

    def scan(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_gate: Tensor | None, **options: Any) -> Tensor:
        """The scan, timed in the forward pass and, by hooks on its input and output, in the backward pass."""
        start = time.perf_counter()
        o, _ = efla.linear_attention(q, k, v, beta, log_gate, **options)
        self.scan_seconds += time.perf_counter() - start
        if o.requires_grad:
            begun: list[float] = []
            o.register_hook(lambda grad: begun.append(time.perf_counter()))

            def end(grads: Tensor) -> None:
                if begun:
                    self.scan_seconds += time.perf_counter() - begun.pop()

            v.register_hook(end)
        return o


class Mixer(nn.Module):
    """The mixer of all arms: q, k, v by projection, convolution and SiLU; scan; norm; Wo.

    beta = sigmoid(Wb x); q / sqrt(q.q + 1e-6); keys likewise in the L2 arms. x: [B, T, D] -> [B, T, D].
    Without ``conv`` and with ``norm=False`` it is the mixer of the residual block.
    """

    def __init__(self, config: SmnistConfig, arm: str, probe: Probe, *, conv: bool = True, norm: bool = True) -> None:
        super().__init__()
        D, H = config.width, config.heads
        self.arm, self.heads, self.probe = ARMS[arm], H, probe
        self.options = {"rule": self.arm.rule, "backend": config.backend, "chunk_size": config.chunk_size}
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.convs = nn.ModuleList(ShortConvolution(D) for _ in range(3)) if conv else None
        self.beta = nn.Linear(D, H, bias=False)
        self.norm = RMSNorm(D // H) if norm else None
        self.out = nn.Linear(D, D, bias=False)

    def add_gate(self) -> None:
        """Add gate and output gate of the gated arms. They are drawn last, so the shared tensors are equal in all arms."""
        if not get(self.arm.rule).needs_gate:
            return
        D, H = self.q.in_features, self.heads
        self.gate = nn.Linear(D, H, bias=False)
        self.out_gate = nn.Linear(D, D, bias=False)
        self.a_log = nn.Parameter((16 * torch.rand(H)).clamp(min=1e-4).log())
        dt = torch.exp(math.log(0.001) + torch.rand(H) * (math.log(0.1) - math.log(0.001))).clamp(min=1e-4)
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.convs is None:
            q, k, v = (functional.silu(y) for y in (q, k, v))
        else:
            q, k, v = (conv(y)[0] for conv, y in zip(self.convs, (q, k, v), strict=True))
        q, k, v = (y.view(B, T, self.heads, D // self.heads) for y in (q, k, v))
        q, k = l2_normalize(q), l2_normalize(k) if self.arm.l2_keys else k
        beta = torch.sigmoid(self.beta(x))  # [B, T, H]
        self.probe.see(beta.detach() * k.detach().square().sum(-1))
        log_gate = None
        if get(self.arm.rule).needs_gate:
            log_gate = -self.a_log.exp() * functional.softplus(self.gate(x) + self.dt_bias)
        o = self.probe.scan(q, k, v, beta, log_gate, **self.options)
        o = self.norm(o) if self.norm is not None else o
        o = o.reshape(B, T, D)
        if log_gate is not None:
            o = o * functional.silu(self.out_gate(x))
        y: Tensor = self.out(o)
        return y


class SmnistSwiGLU(nn.Module):
    """W2 (silu(W1 x) * W3 x) of inner width 176. In plain torch: :class:`efla.layers.SwiGLU` rounds differently."""

    def __init__(self, width: int, inner: int = 176) -> None:
        super().__init__()
        self.up, self.side = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(functional.silu(self.up(x)) * self.side(x))
        return y


class Block(nn.Module):
    """A block: one of three placements of the mixer.

    bare:      y = mixer(x)
    prenorm:   y = x + mixer(RMSNorm(x));  y + SwiGLU(RMSNorm(y))
    residual:  y = x + LayerNorm(mixer(x)), the mixer without convolution and without a norm of its own
    """

    def __init__(self, config: SmnistConfig, block: str, arm: str, probe: Probe) -> None:
        super().__init__()
        D, plain = config.width, block == "residual"
        self.kind = block
        self.mixer = Mixer(config, arm, probe, conv=not plain, norm=not plain)
        if block == "prenorm":
            self.norm1, self.norm2, self.mlp = RMSNorm(D), RMSNorm(D), SmnistSwiGLU(D)
        elif block == "residual":
            self.layer_norm = nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.kind == "bare":
            y = self.mixer(x)
        elif self.kind == "prenorm":
            y = x + self.mixer(self.norm1(x))
            y = y + self.mlp(self.norm2(y))
        else:
            y = x + self.layer_norm(self.mixer(x))
        return y


class Classifier(nn.Module):
    """Logits [B, 10] of pixel sequences [B, T]: x_t = w p_t + b + P_t, blocks, RMSNorm, mean over positions (or the last
    one), linear."""

    def __init__(self, config: SmnistConfig, block: str, arm: str) -> None:
        super().__init__()
        D = config.width
        self.probe = Probe()
        self.readout = config.readout
        self.embed = nn.Linear(1, D)
        self.positions = nn.Parameter(torch.randn(config.length, D) * 0.02)
        self.blocks = nn.ModuleList(Block(config, block, arm, self.probe) for _ in range(config.layers))
        self.norm = RMSNorm(D)
        self.head = nn.Linear(D, 10)
        for module in self.blocks:
            assert isinstance(module, Block)
            module.mixer.add_gate()

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels[..., None]) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x.mean(1) if self.readout == "mean" else x[:, -1])
        return logits


class ClampedExactFlow(ExactFlow):
    """Exact flow with the clamps of the authors' script, to show that they change nothing."""

    name = "efla_clamped"

    def coefficients(self, beta: Tensor | None, lam: Tensor, log_gate: Tensor | None = None) -> StepCoefficients:
        assert beta is not None
        lam = lam.clamp(min=1e-6)
        return without_decay(-torch.expm1(-beta * lam) / (lam + 1e-6))


class AuthorsClassifier(nn.Module):
    """The classifier of the authors' script: logits [B, 10] of pixel sequences [B, T] from the last state alone.

        x_t = gelu(w p_t + P_t);   q, k, v = Wq x, Wk x, Wv x;   beta = sigmoid(Wb x + b);   head(LayerNorm(S_T^T q_T))

    One head. Keys of the L2 arms are k / |k|; queries are neither normalised nor scaled. All weights are drawn in the
    script's order, so equal seeds give the script's initial weights and, by ``order_seed``, its order of the data. The
    blocks in ``AUTHORS_CHANGES`` make one change each and draw their own weights last.
    """

    def __init__(self, config: SmnistConfig, block: str, arm: str) -> None:
        super().__init__()
        D = config.width
        self.probe, self.arm, self.block = Probe(), ARMS[arm], block
        rule = ClampedExactFlow() if block == "authors-clamped" else self.arm.rule
        self.options = {"rule": rule, "scale": 1.0, "backend": config.backend, "chunk_size": config.chunk_size}
        self.embed = nn.Linear(1, D, bias=False)
        self.positions = nn.Parameter(torch.randn(config.length, D) * 0.02)
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.beta = nn.Linear(D, 1)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 10)
        for linear in (self.q, self.k, self.v):
            nn.init.xavier_uniform_(linear.weight)
        nn.init.constant_(self.beta.bias, -2.0)
        # The next draws of torch's DataLoader: a seed for its workers, then one for the permutation.
        _, self.order_seed = (int(torch.empty((), dtype=torch.int64).random_()) for _ in range(2))
        convs = [ShortConvolution(D, activation=None) for _ in range(3)] if block == "authors-conv" else []
        self.convs = nn.ModuleList(convs)

    def forward(self, pixels: Tensor) -> Tensor:
        q, k, v, beta = self.project(pixels)
        if self.block == "authors-qnorm":
            q = _unit(q)
        if self.arm.l2_keys:
            k = _unit(k)
        self.probe.see(beta.detach() * torch.linalg.vector_norm(k.detach(), dim=-1, keepdim=True).square())
        q, k, v = (y[:, :, None] for y in (q.expand_as(k), k, v))  # one head
        o = self.probe.scan(q, k, v, beta, None, **self.options)[:, :, 0]
        read = self.norm(o).mean(1) if self.block == "authors-mean" else self.norm(o[:, -1])
        logits: Tensor = self.head(read)
        return logits

    def project(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v: [B, T, D] before any norm, and beta: [B, T, 1]; q: [B, 1, D] where only the last one is read."""
        x = functional.gelu(torch.addcmul(self.positions, pixels[..., None], self.embed.weight[:, 0]))
        every_query = self.block in ("authors-conv", "authors-mean")
        q, k, v = self.q(x if every_query else x[:, -1:]), self.k(x), self.v(x)
        if self.block == "authors-silu":
            q, k, v = (functional.silu(y) for y in (q, k, v))
        elif self.block == "authors-conv":
            q, k, v = (conv(y)[0] for conv, y in zip(self.convs, (q, k, v), strict=True))
        return q, k, v, torch.sigmoid(self.beta(x))


def _unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis as functional.normalize has it, by our kernel where it applies: its backward pass is four
    times as fast."""
    unit = rows.l2_norm(x, 1e-24)
    return functional.normalize(x, dim=-1) if unit is None else unit


Model = Classifier | AuthorsClassifier


def build(config: SmnistConfig, block: str, arm: str, seed: int) -> Model:
    """A classifier. Its initial weights depend only on the seed and the block: every arm draws in the same order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (AuthorsClassifier if block.startswith("authors") else Classifier)(config, block, arm)
    expected = PARAMETERS.get((block, config.length))
    standard = (config.width, config.heads, config.layers) == (64, 1, 1) and not get(ARMS[arm].rule).needs_gate
    if standard and expected is not None:
        assert parameter_count(model) == expected, f"{block}/{arm}: {parameter_count(model)} parameters, not {expected}"
    return model


def optimizer_of(model: nn.Module, config: SmnistConfig, rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay on all parameters except the gate's rate and bias (gated arms only)."""
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (config.weight_decay, 0.0)]
    for name, parameter in model.named_parameters():
        groups[name.endswith(("a_log", "dt_bias"))]["params"].append(parameter)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.999), eps=1e-8)
