"""One token at a time with the state in place: one kernel between a layer's products, and when it must not be taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from efla import rules
from efla.layers import LinearAttention, Mamba2
from efla.layers.attention import MixerState
from efla.native import kernels
from efla.testing import assert_close

pytestmark = pytest.mark.skipif(kernels is None, reason="the kernels were not built")

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"rule": name} for name in rules.names()},
    "grouped heads": {"rule": "gated_efla", "num_key_heads": 1},
    "odd widths": {"head_dim": 5, "value_head_dim": 11, "rule": "gated_efla_log"},
    "no convolution": {"conv_size": 0},
    "wide convolution": {"conv_size": 7},
    "logsigmoid gate": {"rule": "gated_efla", "gate": "logsigmoid"},
    "no output gate": {"rule": "gated_delta", "output_gate": False},
    "negative eigenvalues": {"rule": "delta", "allow_neg_eigval": True},
    "normalised keys, raw queries": {"key_norm": True, "query_norm": False},
}


def make(**options: Any) -> tuple[LinearAttention, Tensor]:
    """A layer whose gates and convolutions matter, and inputs [2, 9, 32]."""
    torch.manual_seed(0)
    layer = LinearAttention(32, **{"num_heads": 2, "head_dim": 16, **options}).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    return layer, torch.randn(2, 9, 32)


@torch.no_grad()
def decode(layer: LinearAttention | Mamba2, x: Tensor, *, in_place: bool) -> dict[str, Tensor]:
    """Outputs of single tokens after the first five, and the state after them."""
    _, state = layer(x[:, :5], output_state=True)
    outputs = []
    for t in range(5, x.shape[1]):
        y, state = layer(x[:, t : t + 1], state=state, output_state=True, inplace_state=in_place)
        outputs.append(y)
    assert state is not None
    found = {"y": torch.cat(outputs, 1), "memory": state.memory}
    return found if state.conv is None else {**found, "conv": state.conv}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the kernel for each call that it took."""
    from efla.scans.backends import native

    made: list[str] = []
    run = native.step_in_place

    def step(kernel: str, *arguments: Any) -> bool:
        done = run(kernel, *arguments)
        made.extend([kernel] * done)
        return done

    monkeypatch.setattr(native, "step_in_place", step)
    return made


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["float32", "bfloat16", "float64"]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_token_in_place_is_a_token(options: dict[str, Any], dtype: torch.dtype, calls: list[str]) -> None:
    layer, x = make(**options)
    layer, x = layer.to(dtype), x.to(dtype)
    expected = decode(copy.deepcopy(layer).double(), x.double(), in_place=False)
    plain = decode(layer, x, in_place=False)
    assert not calls
    assert_close(decode(layer, x, in_place=True), expected, plain)
    assert len(calls) == 4


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["float32", "float64", "bfloat16"]
)
def test_a_mamba2_token_in_place_is_a_token(dtype: torch.dtype, num_groups: int, calls: list[str]) -> None:
    torch.manual_seed(0)
    layer = Mamba2(32, head_dim=12, expand=3, state_size=10, num_groups=num_groups).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    layer, x = layer.to(dtype), torch.randn(2, 9, 32).to(dtype)
    expected = decode(copy.deepcopy(layer).double(), x.double(), in_place=False)
    plain = decode(layer, x, in_place=False)
    assert not calls
    assert_close(decode(layer, x, in_place=True), expected, plain)
    assert calls == ["mamba2_step"] * (0 if dtype == torch.bfloat16 else 4)


@pytest.mark.parametrize("part", ["norm", "conv"])
def test_hooks_inside_mamba2_are_not_bypassed(part: str, calls: list[str]) -> None:
    torch.manual_seed(0)
    layer, x = Mamba2(32, head_dim=16, state_size=8), torch.randn(2, 9, 32)
    seen: list[int] = []
    layer.get_submodule(part).register_forward_hook(lambda *_: seen.append(1))
    decode(layer, x, in_place=True)
    assert len(seen) == 5 and not calls


def test_the_state_is_overwritten_only_where_that_was_asked_for(calls: list[str]) -> None:
    layer, x = make(rule="gated_efla")
    with torch.no_grad():
        _, state = layer(x[:, :5], output_state=True)
        assert state is not None and state.conv is not None
        kept = MixerState(state.conv.clone(), state.memory.clone())
        _, after = layer(x[:, 5:6], state=state, output_state=True)
        assert after is not state
        assert all(map(torch.equal, state, kept))
        version = state.memory._version
        _, same = layer(x[:, 5:6], state=state, output_state=True, inplace_state=True)
    assert same is state
    assert not torch.equal(state.memory, kept.memory)
    assert state.memory._version > version, "autograd must notice"
    assert len(calls) == 1


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)


def double_norm_by_hook(layer: LinearAttention) -> None:
    layer.o_norm.register_forward_hook(lambda module, inputs, output: 2 * output)


def double_norm_by_module(layer: LinearAttention) -> None:
    layer.o_norm = Doubled(layer.o_norm)  # type: ignore[assignment]


def double_convolution(layer: LinearAttention) -> None:
    layer.k_conv.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [double_norm_by_hook, double_norm_by_module, double_convolution])
def test_what_was_put_between_the_products_is_not_bypassed(change: Any, calls: list[str]) -> None:
    layer, x = make()
    change(layer)
    assert_close(
        decode(layer, x, in_place=True), decode(copy.deepcopy(layer).double(), x.double(), in_place=False),
        decode(layer, x, in_place=False),
    )  # fmt: skip
    assert not calls


def test_projections_are_called_as_modules(calls: list[str]) -> None:
    layer, x = make()
    layer.v_proj = Doubled(layer.v_proj)  # type: ignore[assignment]
    doubled = decode(layer, x, in_place=True)
    assert calls
    assert_close(
        doubled, decode(copy.deepcopy(layer).double(), x.double(), in_place=False), decode(layer, x, in_place=False)
    )


def test_with_gradients_the_modules_are_taken(calls: list[str]) -> None:
    layer, x = make()
    with torch.no_grad():
        _, state = layer(x[:, :5], output_state=True)
    y, after = layer(x[:, 5:6], state=state, output_state=True, inplace_state=True)
    y.sum().backward()
    assert layer.q_proj.weight.grad is not None
    assert after is not state and not calls


def test_under_autocast_and_with_mixed_dtypes_the_modules_are_taken(calls: list[str]) -> None:
    layer, x = make()
    with torch.autocast("cpu", torch.bfloat16):
        found = decode(layer, x, in_place=True)
    assert found["y"].dtype == torch.bfloat16
    layer.q_conv.weight.data = layer.q_conv.weight.data.bfloat16()  # type: ignore[union-attr]
    assert decode(layer, x, in_place=True)["y"].isfinite().all()
    assert not calls


def test_a_state_in_another_layout_is_read_right(calls: list[str]) -> None:
    layer, x = make()
    with torch.no_grad():
        _, state = layer(x[:, :5], output_state=True)
        assert state is not None and state.conv is not None
        strided = MixerState(state.conv, state.memory.transpose(2, 3).contiguous().transpose(2, 3))
        y, _ = layer(x[:, 5:6], state=strided, output_state=True, inplace_state=True)
        expected, _ = layer(x[:, 5:6], state=state, output_state=True)
    torch.testing.assert_close(y, expected)
    assert not calls
