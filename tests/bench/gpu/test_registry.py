"""flash-linear-attention's own functions and layers on CPU tensors, by efla's backend in its registry."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional

import efla
from efla import testing
from efla.models import EflaForCausalLM
from efla.models.convert import convert_folder
from efla.native import rows

pytestmark = [
    pytest.mark.gpu_sim,
    pytest.mark.skipif(
        importlib.util.find_spec("fla") is None or importlib.util.find_spec("triton") is None,
        reason="needs flash-linear-attention and triton; `make test-gpu-sim` installs them beside the project",
    ),
]
DTYPES = [torch.float32, torch.bfloat16]


class TritonLaunched(Exception):
    pass


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    """The backend in fla's registry for one test, in which no Triton kernel may run, not even in the interpreter."""
    import fla.layers  # noqa: F401
    from fla import backends
    from triton.runtime.jit import KernelInterface

    from efla.integrations.fla import register

    def refuse(kernel, grid):
        raise TritonLaunched(getattr(kernel, "__name__", kernel))

    monkeypatch.setattr(KernelInterface, "__getitem__", refuse)
    for registries in (backends._operation_registries, backends._function_registries):
        for registry in registries.values():
            monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    register()


@pytest.fixture
def chunk_gated_delta_rule():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


@pytest.fixture
def inputs():
    return testing.make_inputs("gated_delta", batch=2, length=70, key_heads=2, value_heads=4, key_dim=16, value_dim=24)


def test_a_call_with_a_tensor_elsewhere_is_not_taken():
    from fla import backends

    verify = backends._get_operation_registry("gated_delta_rule")._backends["efla"].verify
    offsets, q = torch.tensor([0, 4]), torch.empty(1, 4, 1, 8, device="meta")
    assert verify("chunk_gated_delta_rule", cu_seqlens_cpu=offsets)[0]
    assert verify("chunk_gated_delta_rule", cu_seqlens_cpu=offsets, q=q) == (
        False, "efla's kernels run on the CPU, the tensors are on cpu, meta",
    )  # fmt: skip


def test_cpu_tensors_run_on_our_kernels(chunk_gated_delta_rule, inputs):
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    o, state = chunk_gated_delta_rule(
        q, k, v, inputs.log_gate, inputs.beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    expected, final = efla.linear_attention(
        q, k, v, inputs.beta, inputs.log_gate, rule="gated_delta", qk_l2norm=True, output_final_state=True
    )
    assert torch.equal(o, expected) and torch.equal(state, final)
    o.sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_packed_sequences_and_positional_arguments(chunk_gated_delta_rule, inputs):
    flat = [x.flatten(0, 1)[None] for x in (inputs.q, inputs.k, inputs.v, inputs.log_gate, inputs.beta)]
    o, _ = chunk_gated_delta_rule(*flat, 0.5, cu_seqlens=torch.tensor([0, 70, 140]))
    expected, _ = chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, inputs.log_gate, inputs.beta, 0.5)
    assert torch.equal(o.view_as(expected), expected)


def test_the_environment_switches_it_off(monkeypatch):
    from fla.modules import RMSNorm

    norm, x = RMSNorm(16), torch.randn(2, 16)
    norm(x)
    monkeypatch.setenv("FLA_EFLA", "0")
    with pytest.raises(TritonLaunched):
        norm(x)


# Outputs and every gradient of their modules, beside plain torch in float64.


def results_and_gradients(function, tensors):
    """What a function returns for some tensors, and the gradient of each, for fixed random cotangents."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    results = function(**leaves)
    loss = sum((x.double() * c).sum() for x, c in zip(results, testing.cotangents(*results), strict=True))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {f"result {number}": x.detach() for number, x in enumerate(results)}
    return found | {f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}


def assert_matches_plain_torch(function, plain, tensors, dtype, wide=()):
    """Within the budget of plain torch in the same precision; the tensors named in ``wide`` stay in float32."""
    given = {name: x if name in wide else x.to(dtype) for name, x in tensors.items()}
    truth = results_and_gradients(plain, {name: x.double() for name, x in given.items()})
    testing.assert_close(results_and_gradients(function, given), truth, results_and_gradients(plain, given))


def plain_conv(x, weight, bias=None, residual=None, initial_state=None, *, activation=None, cu_seqlens=None):
    """fla's causal_conv1d of x [B, T, D]: the output and the last W inputs of each sequence."""
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff().tolist()
        pieces = zip(
            x.split(lengths, dim=1),
            [None] * len(lengths) if residual is None else residual.split(lengths, dim=1),
            [None] * len(lengths) if initial_state is None else initial_state.split(1),
            strict=True,
        )
        found = [plain_conv(x, weight, bias, r, state, activation=activation) for x, r, state in pieces]
        return torch.cat([y for y, _ in found], dim=1), torch.cat([state for _, state in found])
    width = weight.shape[1]
    past = x.new_zeros(x.shape[0], x.shape[2], width) if initial_state is None else initial_state
    window = torch.cat([past, x.transpose(1, 2)], dim=2)
    y = functional.conv1d(window, weight[:, None], bias, groups=len(weight))[..., 1:].transpose(1, 2)
    y = y if activation is None else functional.silu(y)
    return y if residual is None else y + residual, window[..., -width:]


PACKED = torch.tensor([0, 2, 60, 60, 200])
CONVOLUTIONS = {
    "dense": {},
    "silu": {"activation": "silu"},
    "everything": {"activation": "swish", "with_": ("bias", "residual", "initial_state")},
    "packed": {"activation": "silu", "cu_seqlens": PACKED},
    "packed-everything": {"activation": "silu", "cu_seqlens": PACKED, "with_": ("bias", "residual", "initial_state")},
    "width-one": {"width": 1, "with_": ("bias", "initial_state")},
    "few-tokens": {"length": 2, "activation": "silu", "with_": ("bias", "initial_state")},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_the_convolution_is_what_plain_torch_computes(case, dtype):
    from fla.modules.causal_conv1d import causal_conv1d

    settings = {"with_": (), "width": 4, "length": 100, **case}
    added, width, length = (settings.pop(name) for name in ("with_", "width", "length"))
    is_packed = "cu_seqlens" in settings
    shape = (1, 200, 64) if is_packed else (2, length, 64)
    tensors = {"x": torch.randn(shape), "weight": torch.randn(64, width)}
    optional = {"bias": (64,), "residual": shape, "initial_state": (4 if is_packed else 2, 64, width)}
    tensors |= {name: torch.randn(optional[name]) for name in added}
    assert_matches_plain_torch(
        lambda **given: causal_conv1d(**given, **settings, output_final_state=True),
        lambda **given: plain_conv(**given, **settings),
        tensors,
        dtype,
    )


@torch.no_grad()
@pytest.mark.parametrize("is_packed", [False, True], ids=["batch", "packed"])
def test_one_token_at_a_time_gives_the_whole_convolution(is_packed):
    from fla.modules import ShortConvolution

    conv, x = ShortConvolution(32, 4, bias=True).double(), torch.randn(3, 7, 32, dtype=torch.float64)
    whole, state = conv(x, output_final_state=True)
    cache, outputs = None, []
    for t in range(7):
        token = x[:, t][None] if is_packed else x[:, t : t + 1]
        cu_seqlens = torch.arange(4) if is_packed else None
        y, cache = conv(token, residual=token, cache=cache, output_final_state=True, cu_seqlens=cu_seqlens)
        outputs.append(y.view(3, 1, 32) - x[:, t : t + 1])
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=0, atol=1e-12)
    assert torch.equal(cache, state)


NORMS = [
    ("RMSNorm", {}),
    ("RMSNorm", {"bias": True}),
    ("RMSNorm", {"elementwise_affine": False}),
    ("LayerNorm", {"bias": True}),
    ("GroupNorm", {"num_groups": 4, "bias": True}),
    ("GroupNorm", {"num_groups": 4, "is_rms_norm": True}),
    ("FusedRMSNormGated", {}),
    ("FusedRMSNormGated", {"activation": "sigmoid"}),
    ("FusedLayerNormGated", {"bias": True}),
    ("RMSNormLinear", {}),
    ("LayerNormLinear", {"bias": True}),
    ("FusedRMSNormGatedLinear", {}),
]


def plain_norm(name, settings, eps):
    """The module of that name as a function of its inputs and parameters in torch's own operations."""

    def function(x, residual=None, g=None, weight=None, bias=None, matrix=None):
        total = x if residual is None else x + residual
        groups = total.unflatten(-1, (settings.get("num_groups", 1), -1))
        is_rms_norm = "RMS" in name or settings.get("is_rms_norm", False)
        y = (functional.rms_norm if is_rms_norm else functional.layer_norm)(groups, groups.shape[-1:], eps=eps)
        y = y.flatten(-2)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        if g is not None:
            y = y * (g.sigmoid() if settings.get("activation") == "sigmoid" else functional.silu(g))
        y = y.to(x.dtype)
        return (y if matrix is None else y @ matrix.T, total)

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", ["without", "residual", "float32-residual"])
@pytest.mark.parametrize(("name", "settings"), NORMS, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
def test_norms_are_what_plain_torch_computes(name, settings, residual, dtype):
    from fla.modules.norm import fused_norm_gate, layernorm

    # The epsilon is large, so that a gradient that forgets it is wrong.
    module = getattr(fused_norm_gate if "Gated" in name else layernorm, name)(hidden_size=64, eps=0.3, **settings)
    parameters = {key: torch.randn(64) for key, _ in module.named_parameters()}
    tensors = {"x": torch.randn(2, 100, 64), **parameters}
    tensors |= {} if residual == "without" else {"residual": torch.randn(2, 100, 64)}
    tensors |= {"g": torch.randn(2, 100, 64)} if "Gated" in name else {}
    tensors |= {"matrix": torch.randn(24, 64)} if "Linear" in name else {}

    def theirs(matrix=None, **given):
        own = {key: given.pop(key) for key in parameters}
        linear = {} if matrix is None else {"weight": matrix, "bias": None}
        return functional_call(module, own, kwargs={**given, **linear, "prenorm": True})

    wide = ("residual",) if residual == "float32-residual" else ()
    assert_matches_plain_torch(theirs, plain_norm(name, settings, 0.3), tensors, dtype, wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_l2_norm_and_swiglu_are_what_plain_torch_computes(dtype):
    from fla.modules.activations import swiglu, swiglu_linear
    from fla.modules.norm.l2norm import l2norm

    x, y, matrix = torch.randn(2, 100, 64), torch.randn(2, 100, 64), torch.randn(24, 64)
    assert_matches_plain_torch(
        lambda x: (l2norm(x, eps=0.3),),
        lambda x: (x / (x.square().sum(-1, keepdim=True) + 0.3).sqrt(),),
        {"x": x},
        dtype,
    )
    assert_matches_plain_torch(
        lambda x, y: (swiglu(x, y),), lambda x, y: (functional.silu(x) * y,), {"x": x, "y": y}, dtype
    )
    assert_matches_plain_torch(
        lambda x, y, matrix: (swiglu_linear(x, y, matrix, None),),
        lambda x, y, matrix: ((functional.silu(x) * y) @ matrix.T,),
        {"x": x, "y": y, "matrix": matrix},
        dtype,
    )


LAYERS = {
    "default": {},
    "grouped": {"num_v_heads": 4, "conv_bias": True, "allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    "no-gate": {"use_gate": False},
    "no-convolution": {"use_short_conv": False},
}


def gated_deltanet(**settings):
    from fla.layers import GatedDeltaNet

    return GatedDeltaNet(**{"hidden_size": 64, "head_dim": 16, "num_heads": 2, "layer_idx": 0, **settings})


def plain_gated_deltanet(layer):
    """The layer as a function of its input and parameters, token by token in torch's own operations."""

    def function(x, **parameters):
        def projected(name):
            return x @ parameters[f"{name}_proj.weight"].T

        def convolved(name, width):
            if not layer.use_short_conv:
                return functional.silu(projected(name)).unflatten(-1, (-1, width))
            weight, bias = parameters[f"{name}_conv1d.weight"].squeeze(1), parameters.get(f"{name}_conv1d.bias")
            return plain_conv(projected(name), weight, bias, activation="silu")[0].unflatten(-1, (-1, width))

        q, k, v = (convolved(name, layer.head_v_dim if name == "v" else layer.head_k_dim) for name in "qkv")
        beta = projected("b").sigmoid() * (2 if layer.allow_neg_eigval else 1)
        log_gate = -parameters["A_log"].exp() * functional.softplus(projected("a") + parameters["dt_bias"])
        o, _ = efla.linear_attention(q, k, v, beta, log_gate, rule="gated_delta", qk_l2norm=True, backend="reference")
        o = functional.rms_norm(o, o.shape[-1:], parameters["o_norm.weight"], layer.o_norm.eps)
        if layer.use_gate:
            gate = projected("g").unflatten(-1, (-1, layer.head_v_dim))
            o = o * (gate.sigmoid() if layer.o_norm.activation == "sigmoid" else functional.silu(gate))
        return (o.flatten(-2) @ parameters["o_proj.weight"].T,)

    return function


@pytest.mark.filterwarnings("ignore:ShortConvolution is crucial")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 100])
@pytest.mark.parametrize("settings", LAYERS.values(), ids=LAYERS)
def test_a_gated_deltanet_layer_and_its_gradients_are_what_plain_torch_computes(settings, length, dtype):
    layer = gated_deltanet(**settings)

    def theirs(x, **parameters):
        return functional_call(layer, parameters, (x,))[:1]

    tensors = {"x": torch.randn(2, length, 64), **dict(layer.named_parameters())}
    assert_matches_plain_torch(theirs, plain_gated_deltanet(layer), tensors, dtype)


def test_a_layer_of_ordinary_size_takes_the_row_kernels_in_both_directions(monkeypatch):
    called = set()

    class Recorder:
        def __getattr__(self, name):
            called.add(name)
            return getattr(original, name)

    original = rows.kernels
    monkeypatch.setattr(rows, "kernels", Recorder())
    gated_deltanet()(torch.randn(2, 100, 64))[0].sum().backward()
    assert called >= {"conv_forward", "conv_backward", "norm_forward", "norm_backward"}


def test_padded_and_packed_rows_are_separate_sequences():
    layer, x = gated_deltanet().double(), torch.randn(2, 70, 64, dtype=torch.float64)
    alone = torch.cat([layer(x[:1, :70])[0], layer(x[1:, 5:70])[0]], dim=1)
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, :5] = 0
    padded = layer(x, attention_mask=mask)[0]
    torch.testing.assert_close(torch.cat([padded[:1], padded[1:, 5:]], dim=1), alone, rtol=0, atol=1e-12)
    packed = torch.cat([x[:1], x[1:, 5:]], dim=1)
    together = layer(packed, cu_seqlens=torch.tensor([0, 70, 135]))[0]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_long_input_continues_from_the_cache():
    from fla.models.utils import Cache

    layer, x = gated_deltanet().double().eval(), torch.randn(2, 150, 64, dtype=torch.float64)
    whole = layer(x)[0]
    first, _, cache = layer(x[:, :70], past_key_values=Cache(), use_cache=True)
    last, _, _ = layer(x[:, 70:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(torch.cat([first, last], dim=1), whole, rtol=0, atol=1e-12)


def test_a_whole_model_has_the_loss_and_gradients_of_the_converted_one(tmp_path):
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    sizes = {"hidden_size": 64, "num_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": 96}
    config = GatedDeltaNetConfig(**sizes, vocab_size=101, fuse_cross_entropy=False)
    theirs = GatedDeltaNetForCausalLM(config)
    theirs.save_pretrained(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    ours = EflaForCausalLM.from_pretrained(tmp_path / "ours")
    tokens, found = torch.randint(0, 101, (2, 100)), []
    for model in (theirs.double().train(), ours.double().train()):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        embeddings = model.get_input_embeddings().weight.grad
        total = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        found.append([loss.detach(), embeddings, total])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_functions_that_ask_no_registry_need_a_gpu():
    """What the guide names as out of reach."""
    from fla.layers import DeltaNet

    with torch.no_grad(), pytest.raises(TritonLaunched):
        gated_deltanet().eval()(torch.randn(1, 64, 64))
    layer = DeltaNet(hidden_size=64, num_heads=2, layer_idx=0).bfloat16()
    with pytest.raises(TritonLaunched):
        layer(torch.randn(1, 100, 64, dtype=torch.bfloat16))
