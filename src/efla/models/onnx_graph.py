"""A language model as an ONNX graph: one function per layer here, one per rule in :mod:`efla.models.onnx_rules`.

The graph serves prefill and decoding: token ids [B, T] and the states in, logits and the states out, B and T free.
It uses opset 24 and two operators of onnxruntime's domain, ``LinearAttention`` and ``CausalConvWithState``.

Names are values in the graph. Shapes: B batch, T tokens, d hidden size, Hk and H key and value heads, K and V widths per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from efla import rules
from efla.errors import unknown_name
from efla.layers import LinearAttention, Mamba2, RMSNorm, ShortConvolution, SoftmaxAttention, SwiGLU
from efla.models.modeling_efla import EflaForCausalLM
from efla.models.onnx_rules import RULES, Step
from efla.scans.keys import L2_EPSILON

OPSET = 24
DOMAIN = "com.microsoft"
BITS = {"int8": 8, "int4": 4}
_BLOCK = 32
"""Weights that share a scale in a quantised product."""
_SMALLEST_ERASE = 1e-20


class Graph:
    """Nodes, weights and states of a graph under construction. Methods that add a node return the name of its output."""

    def __init__(self, quantize: str | None = None) -> None:
        if quantize is not None and quantize not in BITS:
            raise unknown_name("quantisation", quantize, BITS)
        self.bits = None if quantize is None else BITS[quantize]
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.states: list[dict[str, Any]] = []
        self._constants: dict[tuple[Any, ...], str] = {}

    def add(self, operator: str, *inputs: str, others: Sequence[str] = (), domain: str = "", **attributes: Any) -> str:
        """others: the names of the node's outputs after the first."""
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name, *others], name, domain=domain, **attributes))
        return name

    def weight(self, value: Tensor | NDArray[Any]) -> str:
        """A stored array; tensors become float32."""
        array = value.detach().cpu().float().numpy() if isinstance(value, Tensor) else value
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), f"weight_{len(self.weights)}"))
        return self.weights[-1].name

    def constant(self, value: float | Sequence[int]) -> str:
        """A float32 scalar, or a list of int64; equal ones are stored once."""
        key = (type(value), value) if isinstance(value, float) else (list, *value)
        if key not in self._constants:
            kind = np.float32 if isinstance(value, float) else np.int64
            self._constants[key] = self.weight(np.asarray(value, dtype=kind))
        return self._constants[key]

    def state(self, past: str, present: str, shape: list[str | int]) -> str:
        """An input that the output named ``present`` replaces in the next call."""
        self.states.append({"input": past, "output": present, "shape": shape})
        return past

    def reshape(self, x: str, *shape: int) -> str:
        """A 0 keeps the axis."""
        return self.add("Reshape", x, self.constant(shape))

    def split(self, x: str, sizes: Sequence[int], axis: int = -1) -> list[str]:
        others = [f"Split_{len(self.nodes)}.{i}" for i in range(1, len(sizes))]
        return [self.add("Split", x, self.constant(sizes), others=others, axis=axis), *others]

    def silu(self, x: str) -> str:
        return self.add("Mul", x, self.add("Sigmoid", x))

    def linear(self, x: str, *modules: nn.Module, exact: bool = False) -> str:
        """x W^T + b for the concatenated outputs of the modules. exact: not quantised."""
        for module in modules:
            if type(module) is not nn.Linear:
                raise ValueError(
                    f"the export reads torch.nn.Linear layers, but the model has a {type(module).__name__} in its place; "
                    "merge adapters into the weights first (PEFT: merge_and_unload)"
                )
        plain = cast("tuple[nn.Linear, ...]", modules)
        matrix = torch.cat([module.weight.detach().cpu().float() for module in plain])  # [N, K]
        if self.bits is None or exact:
            y = self.add("MatMul", x, self.weight(matrix.T))
        else:
            packed, scales = pack(matrix.numpy(), self.bits)
            y = self.add(
                "MatMulNBits", x, self.weight(packed), self.weight(scales), domain=DOMAIN,
                K=matrix.shape[1], N=matrix.shape[0], bits=self.bits, block_size=_BLOCK, accuracy_level=4,
            )  # fmt: skip
        if any(module.bias is not None for module in plain):
            biases: list[Tensor] = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in plain]
            y = self.add("Add", y, self.weight(torch.cat(biases)))
        return y

    def norm(self, x: str, module: nn.Module) -> str:
        if type(module) is not RMSNorm:
            raise ValueError(
                f"expected an efla.layers.RMSNorm, but the model has a {type(module).__name__} in its place"
            )
        return self.add("RMSNormalization", x, self.weight(module.weight), axis=-1, epsilon=module.eps)

    @cached_property
    def positions(self) -> tuple[str, str]:
        """Positions [T] of the new tokens after the S tokens of the first key-value cache, and the causal mask [T, S + T]."""
        past = next(state["input"] for state in self.states if "past" in state["shape"])
        zero, one = self.add("Squeeze", self.constant([0])), self.add("Squeeze", self.constant([1]))
        num_past = self.add("Squeeze", self.add("Shape", past, start=2, end=3))
        num_new = self.add("Squeeze", self.add("Shape", "input_ids", start=1, end=2))
        total = self.add("Add", num_past, num_new)
        positions = self.add("Range", num_past, total, one)
        column = self.add("Unsqueeze", positions, self.constant([1]))
        return positions, self.add("LessOrEqual", self.add("Range", zero, total, one), column)


def build(model: EflaForCausalLM, *, quantize: str | None = None, last_logits: bool = False) -> Graph:
    """The graph of the whole model; its outputs are ``logits`` and the new states."""
    g = Graph(quantize)
    hidden = _embed(g, model.model.embed_tokens)
    embedding = g.weights[0].name
    for index, block in enumerate(cast("Any", model.model.layers)):
        mixer = _MIXERS.get(type(block.mixer))
        if mixer is None:
            raise unknown_name("mixer to export", type(block.mixer).__name__, [kind.__name__ for kind in _MIXERS])
        hidden = g.add("Add", hidden, mixer(g, g.norm(hidden, block.mixer_norm), block.mixer, index))
        if model.config.intermediate_size:
            hidden = g.add("Add", hidden, _swiglu(g, g.norm(hidden, block.mlp_norm), block.mlp))
    if last_logits:
        hidden = g.add("Slice", hidden, g.constant([-1]), g.constant([2**62]), g.constant([1]))
    hidden = g.norm(hidden, model.model.norm)
    if model.config.tie_word_embeddings and g.bits is None:
        logits = g.add("MatMul", hidden, g.add("Transpose", embedding, perm=[1, 0]))
    else:
        logits = g.linear(hidden, model.lm_head)
    g.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
    return g


def to_model(g: Graph, vocab_size: int, metadata: dict[str, str]) -> onnx.ModelProto:
    """The file's contents."""
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens_out", vocab_size])]
    for state in g.states:
        after = ["total" if size == "past" else size for size in state["shape"]]
        inputs.append(helper.make_tensor_value_info(state["input"], TensorProto.FLOAT, state["shape"]))
        outputs.append(helper.make_tensor_value_info(state["output"], TensorProto.FLOAT, after))
    graph = helper.make_graph(g.nodes, "efla", inputs, outputs, g.weights)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="efla", ir_version=11)
    helper.set_model_props(model, metadata)
    return model


def pack(matrix: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A matrix [N, K] as unsigned integers, [N, blocks, block * bits / 8], and a scale for each block, [N, blocks].

        matrix ~ scale * (integer - 2^(bits - 1))

    The scale maps the block's largest number, with its sign, to the lowest integer, of which there is one more.
    """
    rows, columns = matrix.shape
    blocks = np.pad(matrix, ((0, 0), (0, -columns % _BLOCK))).reshape(rows, -1, _BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    offset = 2 ** (bits - 1)
    scales = -largest / offset
    integers = np.rint(blocks / np.where(scales == 0, 1, scales)) + offset
    integers = integers.clip(0, 2 * offset - 1).astype(np.uint8)
    if bits == 4:
        integers = integers[..., 0::2] | integers[..., 1::2] << 4
    return integers, scales[..., 0].astype(np.float32)


def _embed(g: Graph, module: nn.Module) -> str:
    if type(module) is not nn.Embedding:
        raise ValueError(f"expected a torch.nn.Embedding, but the model has a {type(module).__name__} in its place")
    if g.bits is None:
        return g.add("Gather", g.weight(module.weight), "input_ids")
    # Rows of int8 with a scale each, whatever the products have.
    matrix = module.weight.detach().cpu().float().numpy()
    scales = np.maximum(np.abs(matrix).max(1, keepdims=True), np.float32(1e-30)) / 127
    rows = g.add("Gather", g.weight(np.rint(matrix / scales).astype(np.int8)), "input_ids")
    return g.add("Mul", g.add("Cast", rows, to=TensorProto.FLOAT), g.add("Gather", g.weight(scales), "input_ids"))


def _swiglu(g: Graph, x: str, layer: SwiGLU) -> str:
    """Wd( silu(Wg x) * (Wu x) )."""
    gate, up = g.split(g.linear(x, layer.gate_proj, layer.up_proj), [layer.gate_proj.out_features] * 2)
    return g.linear(g.add("Mul", g.silu(gate), up), layer.down_proj)


def _convolution(g: Graph, x: str, weight: Tensor, bias: Tensor | None, index: int) -> str:
    """silu(conv(x)) of x [B, T, D], with the state [B, D, W - 1]."""
    channels, _, width = weight.shape
    present = f"present_conv.{index}"
    past = g.state(f"past_conv.{index}", present, ["batch", channels, width - 1])
    inputs = [g.add("Transpose", x, perm=[0, 2, 1]), g.weight(weight), "" if bias is None else g.weight(bias), past]
    y = g.add("CausalConvWithState", *inputs, others=[present], domain=DOMAIN, activation="silu")
    return g.add("Transpose", y, perm=[0, 2, 1])


def _scan(
    g: Graph, q: str, k: str, v: str, decay: str | None, beta: str | None, scale: float, shape: list[int], index: int
) -> str:
    """The operator: q, k [B, T, H, K] and v [B, T, H, V] to [B, T, H V], with the state [B, H, K, V]; shape: H, K, V.

    S_t = e^decay S + beta k (v - e^decay S^T k)^T,  or without beta  e^decay S + k v^T;      o_t = scale S_t^T q_t
    """
    heads, key, value = shape
    present = f"present_recurrent.{index}"
    past = g.state(f"past_recurrent.{index}", present, ["batch", *shape])
    kinds = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}
    q, k = (g.reshape(x, 0, 0, heads * key) for x in (q, k))
    inputs = [q, k, g.reshape(v, 0, 0, heads * value), past, decay or "", beta or ""]
    while not inputs[-1]:
        inputs.pop()
    return g.add(
        "LinearAttention", *inputs, others=[present], domain=DOMAIN, q_num_heads=heads, kv_num_heads=heads,
        update_rule=kinds[decay is not None, beta is not None], scale=scale,
    )  # fmt: skip


def _repeat_heads(g: Graph, x: str, num_groups: int, num_heads: int) -> str:
    """[B, T, groups, ...] to [B, T, heads, ...]: each group serves neighbouring heads."""
    if num_groups == num_heads:
        return x
    return g.add("Gather", x, g.constant([h * num_groups // num_heads for h in range(num_heads)]), axis=2)


def _l2_norm(g: Graph, x: str, width: int) -> str:
    """x / sqrt(x.x + eps) over the last axis, as an RMS norm."""
    gain = g.weight(np.full(width, width**-0.5, dtype=np.float32))
    return g.add("RMSNormalization", x, gain, axis=-1, epsilon=L2_EPSILON / width)


def _linear_attention(g: Graph, x: str, layer: LinearAttention, index: int) -> str:
    """The mixer of every rule; its equations are in :class:`efla.layers.LinearAttention`."""
    rule = RULES.get(layer.rule.name)
    if rule is None or type(rules.get(layer.rule.name)) is not type(layer.rule):
        raise ValueError(
            f"rule {layer.rule.name!r} of layer {index} has no ONNX graph; known rules: {', '.join(RULES)}. "
            "Add a function for it to efla.models.onnx_rules.RULES"
        )
    H, Hk, K, V = layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_head_dim
    qkv = g.linear(x, layer.q_proj, layer.k_proj, layer.v_proj)
    convs = [conv for conv in (layer.q_conv, layer.k_conv, layer.v_conv) if conv is not None]
    if convs:
        qkv = _convolution(g, qkv, torch.cat([_plain(conv).weight for conv in convs]), None, index)
    else:
        qkv = g.silu(qkv)
    q, k, v = g.split(qkv, [Hk * K, Hk * K, H * V])
    q, k, v = g.reshape(q, 0, 0, Hk, K), g.reshape(k, 0, 0, Hk, K), g.reshape(v, 0, 0, H, V)
    q = _l2_norm(g, q, K) if layer.query_norm else q
    k = _l2_norm(g, k, K) if layer.key_norm else k
    q, k = _repeat_heads(g, q, Hk, H), _repeat_heads(g, k, Hk, H)

    log_decay, erase, write = rule(Step(g, k, _beta(g, x, layer), _log_gate(g, x, layer)))
    if write is not None and write != erase:
        # The operator writes with the factor it erases with, so the values carry the quotient.
        if erase is not None:
            erase = g.add("Max", erase, g.constant(_SMALLEST_ERASE))
            write = g.add("Div", write, erase)
        v = g.add("Mul", v, g.add("Unsqueeze", write, g.constant([-1])))
    o = _scan(g, q, k, v, log_decay, erase, K**-0.5, [H, K, V], index)
    o = g.reshape(g.norm(g.reshape(o, 0, 0, H, V), layer.o_norm), 0, 0, H * V)
    if layer.g_proj is not None:
        o = g.add("Mul", o, g.silu(g.linear(x, layer.g_proj)))
    return g.linear(o, layer.o_proj)


def _plain(conv: nn.Module) -> ShortConvolution:
    if type(conv) is not ShortConvolution or conv.activation != "silu":
        raise ValueError(f"expected an efla.layers.ShortConvolution with SiLU, but the model has {conv!r} in its place")
    return conv


def _beta(g: Graph, x: str, layer: LinearAttention) -> str:
    if layer.b_proj is None:
        return ""
    beta = g.add("Sigmoid", g.linear(x, layer.b_proj, exact=True))
    return g.add("Mul", beta, g.constant(2.0)) if layer.allow_neg_eigval else beta


def _log_gate(g: Graph, x: str, layer: LinearAttention) -> str:
    """-exp(A_log) softplus(Wa x + dt_bias), or logsigmoid(Wa x) / 16 = -softplus(-Wa x) / 16."""
    if layer.a_proj is None:
        return ""
    raw = g.linear(x, layer.a_proj, exact=True)
    if layer.A_log is not None and layer.dt_bias is not None:
        return _decay_of(g, _softplus_with_bias(g, raw, layer.dt_bias), layer.A_log)
    return g.add("Mul", g.add("Softplus", g.add("Neg", raw)), g.constant(-1 / 16))


def _softplus_with_bias(g: Graph, x: str, bias: Tensor) -> str:
    return g.add("Softplus", g.add("Add", x, g.weight(bias)))


def _decay_of(g: Graph, dt: str, log_rate: Tensor) -> str:
    return g.add("Mul", dt, g.weight(-log_rate.detach().float().exp()))


def _mamba2(g: Graph, x: str, layer: Mamba2, index: int) -> str:
    """The rule ``ssd`` with k = B, q = C, v = dt x; the equations are in :class:`efla.layers.Mamba2`."""
    H, N, P, groups = layer.num_heads, layer.state_size, layer.head_dim, layer.num_groups
    inner, conv = layer.inner_size, _plain(layer.conv)
    z, xbc, raw = g.split(g.linear(x, layer.in_proj), [inner, inner + 2 * layer.group_width, H])
    value, b, c = g.split(_convolution(g, xbc, conv.weight, conv.bias, index), [inner, *[layer.group_width] * 2])
    dt = _softplus_with_bias(g, raw, layer.dt_bias)  # [B, T, H]
    b, c = (_repeat_heads(g, g.reshape(y, 0, 0, groups, N), groups, H) for y in (b, c))
    value = g.reshape(value, 0, 0, H, P)
    v = g.add("Mul", value, g.add("Unsqueeze", dt, g.constant([-1])))
    y = g.reshape(_scan(g, c, b, v, _decay_of(g, dt, layer.A_log), None, 1.0, [H, N, P], index), 0, 0, H, P)
    y = g.reshape(g.add("Add", y, g.add("Mul", value, g.weight(layer.D[:, None]))), 0, 0, inner)
    return g.linear(g.norm(g.add("Mul", y, g.silu(z)), layer.norm), layer.out_proj)


def _softmax_attention(g: Graph, x: str, layer: SoftmaxAttention, index: int) -> str:
    """ONNX's Attention with a key-value cache [B, H, S, D]; positions are rotary."""
    H, Hk, D = layer.num_heads, layer.num_key_value_heads, layer.head_dim
    past, present = f"past_key_values.{index}", f"present.{index}"
    key = g.state(f"{past}.key", f"{present}.key", ["batch", Hk, "past", D])
    value = g.state(f"{past}.value", f"{present}.value", ["batch", Hk, "past", D])
    positions, mask = g.positions
    qk = g.reshape(g.linear(x, layer.q_proj, layer.k_proj), 0, 0, H + Hk, D)
    q, k = g.split(_rotate(g, g.add("Transpose", qk, perm=[0, 2, 1, 3]), positions, layer), [H, Hk], axis=1)
    v = g.add("Transpose", g.reshape(g.linear(x, layer.v_proj), 0, 0, Hk, D), perm=[0, 2, 1, 3])
    others = [f"{present}.key", f"{present}.value"]
    o = g.add("Attention", q, k, v, mask, key, value, others=others, scale=layer.scaling)
    return g.linear(g.reshape(g.add("Transpose", o, perm=[0, 2, 1, 3]), 0, 0, H * D), layer.o_proj)


def _rotate(g: Graph, x: str, positions: str, layer: SoftmaxAttention) -> str:
    """Rotate the pairs (j, j + D/2) of x [B, H, T, D] by position * theta^(-2j/D)."""
    D = layer.head_dim
    frequencies = layer.rope_theta ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
    column = g.add("Unsqueeze", g.add("Cast", positions, to=TensorProto.FLOAT), g.constant([1]))
    angles = g.add("Mul", column, g.weight(frequencies))
    cos, sin = g.add("Cos", angles), g.add("Sin", angles)
    first, second = g.split(x, [D // 2, D // 2])
    left = g.add("Sub", g.add("Mul", first, cos), g.add("Mul", second, sin))
    right = g.add("Add", g.add("Mul", second, cos), g.add("Mul", first, sin))
    return g.add("Concat", left, right, axis=-1)


_MIXERS: dict[type, Callable[[Graph, str, Any, int], str]] = {
    LinearAttention: _linear_attention,
    Mamba2: _mamba2,
    SoftmaxAttention: _softmax_attention,
}
