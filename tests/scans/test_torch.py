"""The scan inside torch's machinery: compile, checkpoint, autocast, opcheck, memory."""

from __future__ import annotations

import pytest
import torch

import efla
from efla.scans.operators import scan_backward_op, scan_op
from efla.testing import make_inputs
from tests.scans.cases import BACKENDS

ALL_BACKENDS = [*BACKENDS, "reference"]


def attention(q, k, v, beta, log_gate, cu_seqlens=None, *, backend, rule="gated_efla", qk_l2norm=False):
    o, state = efla.linear_attention(
        q, k, v, beta, log_gate, rule=rule, output_final_state=True, backend=backend, cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm, chunk_size=16,
    )  # fmt: skip
    return o, state


def leaves_of(length: int, **options):
    inputs = make_inputs("gated_efla", length=length, key_dim=8, value_dim=8, **options)
    return [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate)], inputs.cu_seqlens


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_compiles_as_one_graph_for_every_length(backend, qk_l2norm):
    graphs = []

    def count(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=count))
    for length in (20, 33, 50):
        leaves, _ = leaves_of(length)
        expected = attention(*leaves, backend=backend, qk_l2norm=qk_l2norm)
        got = compiled(*leaves, backend=backend, qk_l2norm=qk_l2norm)
        torch.testing.assert_close(got, expected)
        grads = [torch.autograd.grad(x[0].square().sum() + x[1].sum(), leaves) for x in (got, expected)]
        torch.testing.assert_close(*grads)
    assert (
        len(graphs) <= 4
    )  # one forward and one backward graph, not one per length (each may be seen by both compilers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_with_packed_sequences(backend):
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    leaves, cu_seqlens = leaves_of(0, packed=[5, 20, 8])
    expected = attention(*leaves, cu_seqlens, backend=backend)
    got = compiled(*leaves, cu_seqlens, backend=backend)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad(x[0].square().sum() + x[1].sum(), leaves) for x in (got, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_works_under_activation_checkpointing(backend):
    leaves, _ = leaves_of(40)

    def loss(function):
        o, state = function(*leaves, backend=backend)
        return torch.autograd.grad(o.square().sum() + state.sum(), leaves)

    def checkpointed(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(attention, *args, use_reentrant=False, **kwargs)

    torch.testing.assert_close(loss(checkpointed), loss(attention), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
def test_autocast_does_not_reach_inside(backend, rule):
    inputs = make_inputs(rule, length=40)
    expected = inputs.call(backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = inputs.call(backend)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("packed", [None, [5, 0, 20]], ids=["dense", "packed"])
def test_operator_passes_opcheck(backend, packed):
    leaves, cu_seqlens = leaves_of(25, packed=packed, initial_state=True)
    q, k, v, _, _ = leaves
    scalar = torch.rand(q.shape[:3])
    tensors = (q, k, v, -scalar, scalar.clone(), scalar.clone(), None, None, None)
    torch.library.opcheck(scan_op, (*tensors, cu_seqlens, 0.5, 16, "", "", backend, True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_keeps_nothing_but_inputs_and_border_states(backend):
    """Bytes kept for the backward pass: inputs and one state per 64 tokens, neither C * T nor T * K * V."""
    length, width = 1024, 32
    inputs = make_inputs(
        "gated_efla", batch=1, length=length, key_heads=1, value_heads=1, key_dim=width, value_dim=width
    )
    leaves = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
    kept: dict[int, int] = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs.call(backend)
    assert leaves
    tokens = length * width * 4
    border_states = length // 64 * width * width * 4
    scalars = length * 8
    assert sum(kept.values()) <= 4 * tokens + border_states + 60 * scalars


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_accumulates_in_float32(backend):
    inputs = make_inputs("efla", length=100, dtype=torch.bfloat16)
    o, state = inputs.call(backend)
    assert o.dtype == torch.bfloat16
    assert state.dtype == torch.float32


@pytest.mark.parametrize(("name", "value"), [("beta", -0.25), ("log_gate", 0.5)])
def test_compiled_code_still_refuses_values_outside_the_domain(name, value):
    """Tracing sees no values: the kernels' own status is what is left to notice them."""
    inputs = make_inputs("gated_efla", length=20)
    inputs.tensors()[name][-1, -1, -1] = value
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=f"{name} must be .* got {value}"):
        compiled(inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate, backend="native")


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_float64_state_makes_the_whole_call_float64(backend, grad):
    inputs = make_inputs("gated_efla", length=40, initial_state=True)
    wide = inputs.initial_state.double()
    with torch.set_grad_enabled(grad):
        o, state = efla.linear_attention(
            inputs.q, inputs.k, inputs.v, inputs.beta, inputs.log_gate, rule="gated_efla", initial_state=wide,
            output_final_state=True, backend=backend,
        )  # fmt: skip
    expected = inputs.double().call("reference")
    assert (o.dtype, state.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(state, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_operator_returns_gradients_of_the_inputs_dtypes(backend):
    """Autograd would cast them by itself; compiled code takes them as they are."""
    inputs = make_inputs("efla", length=20, dtype=torch.bfloat16, initial_state=True)
    scalar = inputs.beta.float()
    tensors = (inputs.q, inputs.k, inputs.v, -scalar, scalar, scalar, None, None, inputs.initial_state)
    settings = (0.5, 16, "", "", backend)
    o, _, saved = scan_op(*tensors, None, *settings, True)
    grads = scan_backward_op(*tensors, None, saved, o, None, *settings)
    for x, grad in zip(tensors, grads, strict=True):
        assert x is None or (grad.dtype, grad.shape) == (x.dtype, x.shape)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_scalars_of_another_dtype_are_converted(backend, dtype):
    inputs = make_inputs("efla", length=20)
    scalars = [x.to(dtype) for x in (-inputs.beta, inputs.beta, 0.5 * inputs.beta)]
    options = {"output_final_state": True, "backend": backend}
    found = efla.scan(inputs.q, inputs.k, inputs.v, *scalars, **options)
    expected = efla.scan(inputs.q, inputs.k, inputs.v, *(x.float() for x in scalars), **options)
    bits = {"rtol": 0, "atol": 0} if backend == "native" else {}  # the others are torch's products
    torch.testing.assert_close(found, expected, **bits)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_the_state_after_no_tokens_is_a_copy(backend):
    inputs = make_inputs("efla", length=0, initial_state=True)
    _, state = inputs.call(backend)
    torch.testing.assert_close(state, inputs.initial_state, rtol=0, atol=0)
    assert state.data_ptr() != inputs.initial_state.data_ptr()


@pytest.mark.parametrize("rule", ["efla", "gated_efla"])
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_tensors_without_values_give_shapes(backend, rule):
    """On the meta device and in a fake mode, with gradients: what FLOP counters and memory estimates run on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(inputs):
        leaves = {name: x.requires_grad_() for name, x in inputs.tensors().items()}
        o, state = inputs.call(backend)
        grads = torch.autograd.grad(o.sum() + state.sum(), list(leaves.values()), allow_unused=True)
        return o.shape, state.shape, [None if g is None else g.shape for g in grads]

    inputs = make_inputs(rule, length=70, initial_state=True)
    expected = shapes(make_inputs(rule, length=70, initial_state=True))
    assert shapes(make_inputs(rule, length=70, initial_state=True, device="meta")) == expected
    with FakeTensorMode() as mode:
        fake = efla.testing.replace(inputs, **{n: mode.from_tensor(x) for n, x in inputs.tensors().items()})
        assert shapes(fake) == expected
