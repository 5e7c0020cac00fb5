"""flash-linear-attention's names give the rules they stand for, and take what they take there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import efla
from efla.testing import make_inputs

CASES = [
    (form + suffix, rule)
    for form in ("chunk_", "fused_recurrent_")
    for suffix, rule in [
        ("delta_rule", "delta"), ("gated_delta_rule", "gated_delta"), ("efla", "efla"), ("gated_efla", "gated_efla"),
    ]
]  # fmt: skip


# The parameters of flash-linear-attention 0.6.0 in order (required ones without a default), and what it takes from **kwargs.
SIGNATURES = {
    "chunk_delta_rule": (
        "q k v beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False cu_seqlens=None "
        "cu_seqlens_cpu=None",
        "chunk_size=64 head_first=False",
    ),
    "fused_recurrent_delta_rule": (
        "q k v beta=None scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "cu_seqlens=None",
        "",
    ),
    "chunk_gated_delta_rule": (
        "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens=None cu_seqlens_cpu=None "
        "chunk_indices=None cp_context=None",
        "use_gate_in_kernel=False A_log=None dt_bias=None chunk_size=64 head_first=False transpose_state_layout=None",
    ),
    "fused_recurrent_gated_delta_rule": (
        "q k v g=None gk=None gv=None beta=None scale=None initial_state=None output_final_state=False "
        "use_qk_l2norm_in_kernel=False use_gate_in_kernel=False A_log=None dt_bias=None use_beta_sigmoid_in_kernel=False "
        "allow_neg_eigval=False state_v_first=False cu_seqlens=None",
        "chunk_size=64 head_first=False transpose_state_layout=None",
    ),
    "naive_recurrent_gated_delta_rule": (
        "q k v beta g scale=None initial_state=None output_final_state=False",
        "",
    ),
    "naive_chunk_gated_delta_rule": (
        "q k v g beta chunk_size=64 scale=None initial_state=None output_final_state=False",
        "",
    ),
}
OURS = {"efla": "delta_rule", "gated_efla": "gated_delta_rule"}


def parameters(function: Callable[..., Any]) -> tuple[str, str]:
    """Positional and keyword-only parameters, as in SIGNATURES."""
    shown: dict[Any, list[str]] = {}
    for p in inspect.signature(function).parameters.values():
        shown.setdefault(p.kind, []).append(p.name if p.default is p.empty else f"{p.name}={p.default}")
    return " ".join(shown.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])), " ".join(
        shown.get(inspect.Parameter.KEYWORD_ONLY, [])
    )


def test_arguments_their_order_and_defaults_are_those_of_flash_linear_attention() -> None:
    for name, expected in SIGNATURES.items():
        assert parameters(getattr(efla.ops, name)) == expected, name
    for ours, theirs in OURS.items():
        for form in ("chunk_", "fused_recurrent_"):
            assert parameters(getattr(efla.ops, form + ours)) == SIGNATURES[form + theirs]
    assert efla.ops.chunk_gdn is efla.ops.chunk_gated_delta_rule
    assert efla.ops.fused_recurrent_gdn is efla.ops.fused_recurrent_gated_delta_rule


@pytest.mark.gpu_sim
def test_the_table_is_that_of_the_installed_flash_linear_attention() -> None:
    fla = pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    if not fla.__version__.startswith("0.6."):
        pytest.skip(f"the table is that of 0.6, installed is {fla.__version__}")
    delta, gated = pytest.importorskip("fla.ops.delta_rule"), pytest.importorskip("fla.ops.gated_delta_rule")
    for name, (positional, keywords) in SIGNATURES.items():
        theirs = inspect.unwrap(getattr(gated if "gated" in name else delta, name))
        assert parameters(theirs)[0] == positional, name
        kinds = {p.kind for p in inspect.signature(theirs).parameters.values()}
        assert (inspect.Parameter.VAR_KEYWORD in kinds) == bool(keywords), name
    public = {*delta.__all__, *gated.__all__} - {"fused_chunk_delta_rule"}  # raises there
    assert public <= set(efla.ops.__all__)


def arguments(rule: str, **options: Any) -> dict[str, Any]:
    inputs = make_inputs(rule, **options)
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.log_gate, "beta": inputs.beta}
    return {name: value for name, value in named.items() if value is not None}


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_function_is_the_rule(name: str, rule: str) -> None:
    inputs = make_inputs(rule, length=30, packed=[10, 20], initial_state=True, qk_l2norm=True)
    given = arguments(rule, length=30, packed=[10, 20], initial_state=True, qk_l2norm=True)
    got = getattr(efla.ops, name)(
        **given, scale=0.3, initial_state=inputs.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True,
        cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    expected = efla.linear_attention(
        inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate, rule=rule, scale=0.3,
        initial_state=inputs.initial_state, output_final_state=True, qk_l2norm=True, cu_seqlens=inputs.cu_seqlens,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def run(name: str, given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    return getattr(efla.ops, name)(**given, output_final_state=True, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])
def test_what_the_kernel_computes_there_is_computed_here(name: str) -> None:
    # As flash-linear-attention's own GatedDeltaNet layer calls it.
    given = arguments("gated_delta", length=20)
    H = given["v"].shape[2]
    raw, raw_beta, log_rate, bias = torch.randn(1, 20, H), torch.randn(1, 20, H), torch.rand(H), torch.randn(H)
    raw, raw_beta = (x.expand(given["v"].shape[0], -1, -1) for x in (raw, raw_beta))
    state = torch.randn(given["v"].shape[0], H, given["k"].shape[3], given["v"].shape[3])
    gate = -log_rate.exp() * torch.nn.functional.softplus(raw + bias)
    expected = run(name, {**given, "g": gate, "beta": 2 * raw_beta.sigmoid()}, initial_state=state)
    got = run(
        name, {**given, "g": raw, "beta": raw_beta}, initial_state=state.transpose(2, 3), use_gate_in_kernel=True,
        A_log=log_rate, dt_bias=bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, state_v_first=True,
    )  # fmt: skip
    torch.testing.assert_close((got[0], got[1].transpose(2, 3)), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["chunk_gdn", "fused_recurrent_gdn"])
def test_the_former_name_of_state_v_first_and_defaults_given_by_name_are_taken(name: str) -> None:
    given = arguments("gated_delta", length=20)
    o, state = run(name, given, state_v_first=True)
    got = run(name, given, transpose_state_layout=True, chunk_size=64, head_first=False)
    torch.testing.assert_close(got, (o, state), rtol=0, atol=0)


def test_half_states_mixed_dtypes_and_missing_inputs_are_taken() -> None:
    given = arguments("gated_delta", length=20)
    wide = run("chunk_gdn", given)
    mixed = {**given, "q": given["q"].bfloat16().float(), "v": given["v"].bfloat16(), "g": given["g"].double()}
    o, state = run("chunk_gdn", mixed, initial_state=torch.zeros_like(wide[1], dtype=torch.bfloat16))
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(o.float(), wide[0], rtol=0.05, atol=0.05)
    ones = torch.ones_like(given["beta"])
    delta = {name: given[name] for name in "qkv"}
    expected = run("chunk_delta_rule", {**delta, "beta": ones})
    for name in ("fused_recurrent_delta_rule", "fused_recurrent_gdn"):  # neither gate nor beta
        torch.testing.assert_close(run(name, delta), expected, rtol=0, atol=0)


def test_the_naive_functions_are_the_rule_in_float32() -> None:
    given = arguments("gated_delta", length=20)
    expected = run("chunk_gdn", given)
    for name in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"):
        torch.testing.assert_close(run(name, given), expected, rtol=1e-4, atol=1e-5)
    half = {name: x.bfloat16() for name, x in given.items()}
    assert run("naive_recurrent_gated_delta_rule", half)[0].dtype == torch.float32
    positional = efla.ops.naive_recurrent_gated_delta_rule(*(given[name] for name in ("q", "k", "v", "beta", "g")))
    torch.testing.assert_close(positional[0], expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chunk_gdn", {"cp_context": object()}, "takes no cp_context: split sequences over ranks"),
        ("chunk_gdn", {"head_first": True}, r"takes no head_first: inputs are \[B, T, H, D\]"),
        ("fused_recurrent_gdn", {"gk": torch.zeros(1)}, "takes no gk: a gate has one value per head"),
        ("fused_recurrent_gdn", {"gv": torch.zeros(1)}, "takes no gv: a gate has one value per head"),
        ("fused_recurrent_gdn", {"head_first": True}, r"takes no head_first: inputs are \[B, T, H, D\]"),
        ("fused_recurrent_gdn", {"chunk_size": 32}, "takes no chunk_size: a fused_recurrent_ function has no chunks"),
        *(
            (
                name,
                {"state_v_first": True, "transpose_state_layout": old},
                "no transpose_state_layout beside state_v_first",
            )
            for name in ("chunk_gdn", "fused_recurrent_gdn")
            for old in (False, True)
        ),
        ("chunk_gdn", {"use_gate_in_kernel": True}, "needs g, before its activation, and A_log"),
        ("chunk_gdn", {"allow_neg_eigval": True}, "needs use_beta_sigmoid_in_kernel=True"),
        ("chunk_gdn", {"chunk_size": 48}, "chunk_size must be one of"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(name, arguments("gated_delta", length=5), **options)


def test_no_state_unless_asked() -> None:
    inputs = make_inputs("delta", length=5)
    assert efla.ops.chunk_delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta)[1] is None


def test_a_misspelt_argument_is_an_error() -> None:
    inputs = make_inputs("delta", length=5)
    with pytest.raises(TypeError, match="use_qk_l2norm"):
        efla.ops.chunk_delta_rule(inputs.q, inputs.k, inputs.v, inputs.beta, use_qk_l2norm=True)
