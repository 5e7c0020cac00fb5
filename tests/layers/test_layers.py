"""The layers alone: what they compute, written out token by token, and what padding, packing and cuts leave unchanged."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from efla import rules
from efla.layers import LinearAttention, Mamba2, RMSNorm, ShortConvolution, SoftmaxAttention, SwiGLU
from efla.layers.blocks import swiglu_width
from efla.native import kernels, rows
from efla.testing import make_inputs
from tests.rounding import assert_same_but_rounding

WIDTH = 24


def causal_conv(x, conv):
    """Each channel with its own last values, one product at a time. x: [T, D]."""
    T = x.shape[0]
    y = torch.zeros_like(x)
    for t in range(T):
        for i in range(conv.kernel_size):
            source = t - conv.kernel_size + 1 + i
            if source >= 0:
                y[t] += conv.weight[:, 0, i] * x[source]
    return functional.silu(y if conv.bias is None else y + conv.bias)


def l2(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


# (log_decay, erase, write) as in the specification's table, with lam = k.k and a = exp(g).
def phi1(x):
    return -torch.expm1(-x) / x


TABLE = {
    "delta": lambda b, lam, g: (0 * b, b, b),
    "efla": lambda b, lam, g: (0 * b, b * phi1(b * lam), b * phi1(b * lam)),
    "implicit_euler": lambda b, lam, g: (0 * b, b / (1 + b * lam), b / (1 + b * lam)),
    "gated_delta": lambda b, lam, g: (g, b, b),
    "gated_efla": lambda b, lam, g: (
        -(1 - g.exp()),
        g.exp() * b * phi1(g.exp() * b * lam),
        b * phi1((1 - g.exp()) + g.exp() * b * lam),
    ),
}


@pytest.mark.parametrize("rule", TABLE)
def test_the_mixer_is_the_specification_token_by_token(rule):
    torch.manual_seed(1)
    H, K, V = 2, 8, 12
    layer = LinearAttention(WIDTH, num_heads=H, head_dim=K, value_head_dim=V, rule=rule, eps=1e-6).double()
    is_gated = rule.startswith("gated")
    assert (layer.g_proj is not None) == is_gated
    x = torch.randn(1, 15, WIDTH, dtype=torch.float64)
    u = x[0]
    q = causal_conv(u @ layer.q_proj.weight.T, layer.q_conv).view(15, H, K)
    k = causal_conv(u @ layer.k_proj.weight.T, layer.k_conv).view(15, H, K)
    v = causal_conv(u @ layer.v_proj.weight.T, layer.v_conv).view(15, H, V)
    beta = torch.sigmoid(u @ layer.b_proj.weight.T)
    g = torch.zeros_like(beta)
    if is_gated:
        g = -torch.exp(layer.A_log) * torch.log1p(torch.exp(u @ layer.a_proj.weight.T + layer.dt_bias))
    q = l2(q) * K**-0.5
    if rule in ("delta", "gated_delta"):
        k = l2(k)
    state = torch.zeros(H, K, V, dtype=torch.float64)
    rows = []
    for t in range(15):
        log_decay, erase, write = TABLE[rule](beta[t], (k[t] * k[t]).sum(-1), g[t])
        for h in range(H):
            step = torch.eye(K, dtype=torch.float64) - erase[h] * torch.outer(k[t, h], k[t, h])
            state[h] = log_decay[h].exp() * step @ state[h] + write[h] * torch.outer(k[t, h], v[t, h])
        o = torch.stack([state[h].T @ q[t, h] for h in range(H)])
        o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6) * layer.o_norm.weight
        if is_gated:
            o = o * functional.silu(layer.g_proj.weight @ u[t]).view(H, V)
        rows.append(layer.o_proj.weight @ o.flatten())
    torch.testing.assert_close(layer(x)[0][0], torch.stack(rows), atol=1e-10, rtol=1e-8)


def test_mamba2_is_the_specification_token_by_token():
    torch.manual_seed(1)
    N, P, H, T = 8, 16, 3, 15
    layer = Mamba2(WIDTH, expand=2, head_dim=P, state_size=N).double()
    x = torch.randn(1, T, WIDTH, dtype=torch.float64)
    z, xbc, dt = torch.split(x[0] @ layer.in_proj.weight.T, [H * P, H * P + 2 * N, H], dim=1)
    xbc = causal_conv(xbc, layer.conv)
    value, b, c = xbc[:, : H * P].view(T, H, P), xbc[:, H * P : H * P + N], xbc[:, H * P + N :]
    dt = torch.log1p(torch.exp(dt + layer.dt_bias))
    decay = torch.exp(-torch.exp(layer.A_log) * dt)
    state = torch.zeros(H, P, N, dtype=torch.float64)
    rows = []
    for t in range(T):
        state = decay[t, :, None, None] * state + dt[t, :, None, None] * value[t, :, :, None] * b[t, None, None]
        y = state @ c[t] + layer.D[:, None] * value[t]
        y = y.flatten() * functional.silu(z[t])
        rows.append(layer.out_proj.weight @ (y / torch.sqrt((y * y).mean() + 1e-5) * layer.norm.weight))
    torch.testing.assert_close(layer(x)[0][0], torch.stack(rows), atol=1e-10, rtol=1e-8)


def test_softmax_attention_is_the_specification_row_by_row():
    torch.manual_seed(1)
    H, D, T = 4, 6, 9
    layer = SoftmaxAttention(WIDTH, num_heads=H, num_key_value_heads=2).double()
    x = torch.randn(1, T, WIDTH, dtype=torch.float64)

    def rotated(vector, t):
        out = torch.empty_like(vector)
        for j in range(D // 2):
            angle = t * 10_000 ** (-2 * j / D)
            a, b = vector[j], vector[j + D // 2]
            out[j], out[j + D // 2] = (
                a * math.cos(angle) - b * math.sin(angle),
                b * math.cos(angle) + a * math.sin(angle),
            )
        return out

    q, k, v = (x[0] @ proj.weight.T for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = q.view(T, H, D), k.view(T, 2, D), v.view(T, 2, D)
    rows = []
    for t in range(T):
        heads = []
        for h in range(H):
            scores = torch.stack([rotated(q[t, h], t) @ rotated(k[i, h // 2], i) for i in range(t + 1)]) / D**0.5
            heads.append(scores.softmax(0) @ v[: t + 1, h // 2])
        rows.append(layer.o_proj.weight @ torch.cat(heads))
    # Angles are float32 in the layer, as everywhere.
    torch.testing.assert_close(layer(x)[0][0], torch.stack(rows), atol=1e-6, rtol=1e-5)


def mixers():
    torch.manual_seed(2)
    layers = {rule: LinearAttention(WIDTH, num_heads=2, head_dim=8, rule=rule) for rule in rules.names()}
    layers["grouped"] = LinearAttention(
        WIDTH, num_heads=4, num_key_heads=2, head_dim=8, value_head_dim=4, rule="gated_efla"
    )
    layers["logsigmoid"] = LinearAttention(WIDTH, num_heads=2, head_dim=8, rule="gated_delta", gate="logsigmoid")
    layers["no-convolution"] = LinearAttention(WIDTH, num_heads=2, head_dim=8, conv_size=0)
    layers["mamba2"] = Mamba2(WIDTH, head_dim=16, state_size=8)
    return {name: layer.double() for name, layer in layers.items()}


MIXERS = mixers()


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("cut", [1, 3, 10, 64, 69])
def test_a_sequence_cut_anywhere_goes_on_from_the_state(name, cut):
    layer, x = MIXERS[name], torch.randn(2, 70, WIDTH, dtype=torch.float64)
    whole, final = layer(x, output_state=True)
    first, state = layer(x[:, :cut], output_state=True)
    second, end = layer(x[:, cut:], state=state, output_state=True)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=1e-10, rtol=0)
    torch.testing.assert_close(end.memory, final.memory, atol=1e-10, rtol=0)
    assert (end.conv is None) == (name == "no-convolution")
    if end.conv is not None:
        torch.testing.assert_close(end.conv, final.conv, atol=1e-10, rtol=0)
    assert state.num_bytes() == end.num_bytes()


def padding(where, length):
    """Which tokens of three rows are real: 13, 20 and 9 in 20 of them on one side, or 6 in 10 drawn at random."""
    real = (torch.tensor([13, 20, 9])[:, None] * length // 20).clamp(min=1)
    return {
        "anywhere": torch.rand(3, length) < 0.6,
        "left": torch.arange(length) >= length - real,
        "right": torch.arange(length) < real,
    }[where]


@pytest.mark.parametrize("where", ["anywhere", "left", "right"])
@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_padding_leaves_real_tokens_and_the_state_alone(name, where):
    """Up to rounding: a product with a matrix may round a row otherwise in a taller batch."""
    layer, x, mask = MIXERS[name], torch.randn(3, 20, WIDTH, dtype=torch.float64), padding(where, 20)

    def row_of(results, row, tokens):
        y, state = results
        assert (state.conv is None) == (name == "no-convolution")
        conv = {} if state.conv is None else {"conv": state.conv[row]}
        return {"y": y[row, tokens], "memory": state.memory[row], **conv}

    padded, single = layer(x, mask=mask, output_state=True), copy.deepcopy(layer).float()
    for row in range(3):
        alone = x[row : row + 1, mask[row]]
        expected, low = layer(alone, output_state=True), single(alone.float(), output_state=True)
        assert_same_but_rounding(
            row_of(padded, row, mask[row]), row_of(expected, 0, slice(None)), row_of(low, 0, slice(None))
        )


NEEDS_KERNELS = pytest.mark.skipif(kernels is None, reason="the kernels were not built")


@NEEDS_KERNELS
@pytest.mark.parametrize("where", ["anywhere", "left", "right"])
@pytest.mark.parametrize("length", [2, 9, 20, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_given_the_same_inputs_padding_changes_no_bit_of_the_convolution(dtype, length, where, monkeypatch):
    monkeypatch.setattr(rows, "_SMALL", 0)  # the kernel, whatever the size
    conv, x = ShortConvolution(24, 4, bias=True).to(dtype), torch.randn(3, length, 24).to(dtype)
    torch.nn.init.normal_(conv.bias)
    mask, past = padding(where, length), torch.randn(3, 24, 3).to(dtype)
    for state in (None, past):
        y, end = conv(x, state=state, mask=mask, output_state=True)
        for row in range(3):
            before = None if state is None else state[row : row + 1]
            alone, alone_end = conv(x[row : row + 1, mask[row]], state=before, output_state=True)
            assert torch.equal(y[row, mask[row]], alone[0])
            assert torch.equal(end[row], alone_end[0])


@NEEDS_KERNELS
@pytest.mark.parametrize("length", [20, 65, 150])
@pytest.mark.parametrize("rule", rules.names())
def test_given_the_same_inputs_padding_behind_changes_no_bit_of_the_scan(rule, length):
    """Padding before or between real tokens moves them to other places of a chunk, where sums have another order."""
    inputs = make_inputs(rule, batch=3, length=length, key_dim=24, value_dim=16)
    mask = padding("right", length)
    neutral = {
        name: x.masked_fill(~mask.view(3, length, *[1] * (x.dim() - 2)), 0)
        for name, x in inputs.tensors().items()
        if name in ("k", "beta", "log_gate")
    }
    o, state = replace(inputs, **neutral).call("native")
    for row in range(3):
        alone = {name: x[row : row + 1, mask[row]] for name, x in inputs.tensors().items()}
        alone_o, end = replace(inputs, **alone).call("native")
        assert torch.equal(o[row, mask[row]], alone_o[0])
        assert torch.equal(state[row], end[0])


@pytest.mark.parametrize("where", ["left", "right", "inside"])
def test_the_convolution_skips_padding_in_a_row_shorter_than_its_width(where):
    """In torch's operations: the state is a copy of inputs, the outputs are sums of W products in any order."""
    conv, x = ShortConvolution(6, 4, bias=True).double(), torch.randn(2, 20, 6, dtype=torch.float64)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1] = False
    mask[1, {"left": [18, 19], "right": [0, 1], "inside": [5, 11]}[where]] = True
    y, state = conv(x, mask=mask, output_state=True)
    alone, end = conv(x[1:, mask[1]], output_state=True)
    terms = (conv.weight.abs().sum(-1).max() * x.abs().max()).item()
    roundings = 2 * (conv.kernel_size + 2)  # of products, sums, exp and division, in each of the two
    torch.testing.assert_close(y[1, mask[1]], alone[0], atol=roundings * torch.finfo(x.dtype).eps * terms, rtol=0)
    assert torch.equal(state[1], end[0])


@pytest.mark.parametrize("name", [*MIXERS, "softmax"])
def test_packed_sequences_are_apart(name):
    layer = MIXERS.get(name) or SoftmaxAttention(WIDTH, num_heads=2).double()
    x = torch.randn(1, 30, WIDTH, dtype=torch.float64)
    boundaries = [0, 4, 5, 5, 21, 30]
    packed, _ = layer(x, cu_seqlens=torch.tensor(boundaries, dtype=torch.int32))
    separate = torch.cat([layer(x[:, a:b])[0] for a, b in pairwise(boundaries) if b > a], dim=1)
    torch.testing.assert_close(packed, separate, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", [*MIXERS, "softmax"])
def test_a_later_token_leaves_earlier_outputs_bit_identical(name):
    layer = MIXERS.get(name) or SoftmaxAttention(WIDTH, num_heads=2).double()
    x = torch.randn(1, 30, WIDTH, dtype=torch.float64)
    changed = x.clone()
    changed[:, 17] += 1
    before, after = layer(x)[0], layer(changed)[0]
    assert torch.equal(before[:, :17], after[:, :17])
    assert (before[:, 17:] != after[:, 17:]).any(-1).all()


def test_keys_are_normalised_only_where_a_rule_could_blow_up():
    normalised = {name for name in rules.names() if LinearAttention(WIDTH, num_heads=2, head_dim=8, rule=name).key_norm}
    assert normalised == {"delta", "rk2", "rk4", "gated_delta"}


@pytest.mark.parametrize(
    ("gated", "plain"), [("gated_efla", "efla"), ("gated_delta", "delta"), ("gated_efla_log", "efla")]
)
def test_a_gate_held_open_gives_the_ungated_rule(gated, plain):
    x = torch.randn(2, 20, WIDTH, dtype=torch.float64)
    with_gate = LinearAttention(WIDTH, num_heads=2, head_dim=8, rule=gated).double()
    without = LinearAttention(WIDTH, num_heads=2, head_dim=8, rule=plain, output_gate=True).double()
    without.load_state_dict(with_gate.state_dict(), strict=False)
    assert (with_gate(x)[0] - without(x)[0]).abs().max() > 1e-4
    with torch.no_grad():
        with_gate.A_log.fill_(-math.inf)  # log_gate = 0
    torch.testing.assert_close(with_gate(x)[0], without(x)[0], atol=1e-12, rtol=0)


def test_the_exact_flow_of_tiny_keys_is_the_raw_delta_rule():
    x = torch.randn(2, 20, WIDTH, dtype=torch.float64)
    exact = LinearAttention(WIDTH, num_heads=2, head_dim=8, rule="efla", eps=0.0).double()
    raw = LinearAttention(WIDTH, num_heads=2, head_dim=8, rule="delta", key_norm=False, eps=0.0).double()
    with torch.no_grad():
        exact.k_proj.weight.mul_(1e-3)
    raw.load_state_dict(exact.state_dict())
    difference = (exact(x)[0] - raw(x)[0]).norm() / raw(x)[0].norm()
    assert 0 < difference < 1e-5


def test_the_convolution_is_torch_s():
    conv = ShortConvolution(6, 4, bias=True, activation=None).double()
    torch.nn.init.normal_(conv.bias)
    reference = torch.nn.Conv1d(6, 6, 4, padding=3, groups=6).double()
    reference.load_state_dict(conv.state_dict())
    for length in (1, 3, 8, 9, 40):
        x = torch.randn(2, length, 6, dtype=torch.float64)
        expected = reference(x.transpose(1, 2))[..., :length].transpose(1, 2)
        torch.testing.assert_close(conv(x)[0], expected, atol=1e-12, rtol=0)


def test_rms_norm_has_float32_statistics():
    norm = RMSNorm(64, eps=1e-6)
    x = torch.randn(5, 64).to(torch.bfloat16) * 1e3
    wide = x.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    # One rounding to bfloat16 and a few of float32; statistics in bfloat16 would add as much again.
    torch.testing.assert_close(norm(x).double(), expected, rtol=2**-8 + 2**-20, atol=0)


def test_swiglu_is_its_formula_and_its_width_flame_s():
    layer, x = SwiGLU(8, 20).double(), torch.randn(3, 8, dtype=torch.float64)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    expected = (gate * torch.sigmoid(gate) * up) @ layer.down_proj.weight.T
    torch.testing.assert_close(layer(x), expected)
    assert [swiglu_width(d) for d in (1024, 2048, 768)] == [2816, 5632, 2048]


@pytest.mark.parametrize("name", ["efla", "gated_efla", "delta", "mamba2"])
def test_bfloat16_is_near_float32_and_the_memory_is_float32(name):
    layer = MIXERS[name]
    x = torch.randn(2, 40, WIDTH)
    exact = layer(x.double())[0]
    half = copy.deepcopy(layer).to(torch.bfloat16)
    y, state = half(x.to(torch.bfloat16), output_state=True)
    assert y.dtype == torch.bfloat16
    assert state.memory.dtype == torch.float32
    assert (y.double() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearAttention(8, num_heads=4, num_key_heads=3, head_dim=4), "multiple of num_key_heads = 3, got 4"),
        (lambda: LinearAttention(8, num_heads=4, head_dim=4, rule="elfa"), "unknown rule 'elfa'; did you mean 'efla'"),
        (lambda: LinearAttention(8, num_heads=4, head_dim=4, rule="gated_efla", gate="sigmoid"), "unknown gate"),
        (lambda: Mamba2(24, head_dim=32), r"expand \* hidden_size = 48 must be a multiple of head_dim, got 32"),
        (lambda: Mamba2(24, head_dim=16, num_groups=2), "3 heads cannot be shared evenly by num_groups=2"),
        (lambda: SoftmaxAttention(24, num_heads=5), "hidden_size 24 does not divide into 5 attention heads"),
        (lambda: SoftmaxAttention(24, num_heads=4, num_key_value_heads=3), "cannot share num_key_value_heads=3"),
        (lambda: SoftmaxAttention(24, num_heads=8), "even head width, got 3"),
        (lambda: ShortConvolution(8, 1), "kernel_size must be at least 2, got 1"),
        (lambda: ShortConvolution(8, activation="relu"), "unknown activation 'relu'"),
    ],
)
def test_wrong_sizes_are_refused_with_the_fix(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_packed_call_takes_no_state():
    with pytest.raises(ValueError, match="pad or pack"):
        ShortConvolution(8)(torch.zeros(1, 6, 8), cu_seqlens=torch.tensor([0, 6]), output_state=True)
