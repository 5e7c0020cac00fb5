"""The configuration of every model: ``rule`` and ``mixers`` choose what a layer is."""

import difflib
from typing import Any

from transformers import PreTrainedConfig

from efla import rules
from efla.errors import check_names
from efla.layers.attention import GATES
from efla.layers.blocks import swiglu_width
from efla.models import register_when_loaded

_OTHER_MIXERS = ("linear", "mamba2", "softmax")
_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_heads num_key_heads head_dim value_head_dim num_attention_heads "
    "num_key_value_heads attention_head_dim mamba_expand mamba_head_dim mamba_state_size mamba_num_groups loss_chunk_size"
)


class EflaConfig(PreTrainedConfig):
    """A decoder of ``num_hidden_layers`` blocks, each a token mixer and a SwiGLU.

    rule: the update rule of the linear-attention layers, a name of :func:`efla.rules.names`.
    mixers: what each layer mixes with: "linear" (by ``rule``), a rule's name, "mamba2" or "softmax". A shorter list is
        a pattern and is repeated: ``mixers=["linear", "linear", "linear", "softmax"]`` is one softmax layer in four.
        Default: all "linear". ``layer_types``, which transformers' cache reads, follows from it.
    num_heads, num_key_heads, head_dim, value_head_dim: H, Hk, K, V of the linear layers; head_dim defaults to
        hidden_size / num_heads, V to K, Hk to H. conv_size: 0 leaves the short convolutions out.
    conv_init: "default" (torch's, uniform) or "normal" (as flash-linear-attention's models start).
    key_norm: L2-normalise keys; default only for rules that are not contractive for every key.
    output_gate: default for rules with a forget gate. gate, allow_neg_eigval: see ``efla.layers.LinearAttention``.
    mamba_*: the Mamba-2 layers. num_attention_heads, num_key_value_heads, attention_head_dim, rope_theta: softmax.
    intermediate_size: inner width of the SwiGLU, default 8/3 hidden_size rounded up to 256; 0 for none.
    residual_in_fp32: keep the residual stream in float32 (Mamba-2 does).
    max_position_embeddings: the training length, for evaluation tools; it limits nothing here.
    loss_chunk_size: number of tokens whose logits are in memory at once while the loss is computed.
    backend, chunk_size: as in :func:`efla.linear_attention`.
    """

    model_type = "efla"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    attribute_map = {"num_layers": "num_hidden_layers", "rms_norm_eps": "norm_eps"}  # noqa: RUF012

    vocab_size: int = 32_000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    intermediate_size: int | None = None
    rule: str = "efla"
    mixers: list[str] | None = None
    layer_types: list[str] | None = None
    num_heads: int = 8
    num_key_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    conv_size: int = 4
    conv_init: str = "default"
    key_norm: bool | None = None
    query_norm: bool = True
    output_gate: bool | None = None
    gate: str = "mamba"
    allow_neg_eigval: bool = False
    mamba_expand: int = 2
    mamba_head_dim: int = 64
    mamba_state_size: int = 128
    mamba_num_groups: int = 1
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    attention_head_dim: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    residual_in_fp32: bool = False
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    loss_chunk_size: int = 1024
    backend: str = "auto"
    chunk_size: int = 64

    def __post_init__(self, **kwargs: Any) -> None:
        register_when_loaded()
        kwargs.pop("auto_map", None)  # of a saved folder; see efla.models.saving
        _reject_misspelt(kwargs, self)
        rules.get(self.rule)
        if self.num_key_heads is None:
            self.num_key_heads = self.num_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        for name in _POSITIVE.split():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.intermediate_size is None:
            self.intermediate_size = swiglu_width(self.hidden_size)
        self.mixers = self._resolve_mixers()
        self.layer_types = ["full_attention" if mixer == "softmax" else "linear_attention" for mixer in self.mixers]
        if "softmax" in self.mixers:
            self._resolve_heads("num_attention_heads", "num_key_value_heads", "attention_head_dim")
        if any(mixer not in ("softmax", "mamba2") for mixer in self.mixers):
            self._resolve_heads("num_heads", "num_key_heads", "head_dim")
            if self.value_head_dim is None:
                self.value_head_dim = self.head_dim
        check_names("convolution initialisation (conv_init)", [self.conv_init], ["default", "normal"])
        check_names("gate", [self.gate], GATES)
        if self.conv_size == 1 or self.conv_size < 0:
            raise ValueError(f"conv_size must be 0 (no convolution) or at least 2, got {self.conv_size}")
        super().__post_init__(**kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: transformers would copy our source code into every folder that is saved."""

    def _resolve_mixers(self) -> list[str]:
        """One name per layer: a pattern is repeated, and "linear" becomes the rule."""
        pattern = self.mixers
        if pattern is None:
            pattern = ["linear"]
            if self.layer_types is not None:
                pattern = ["softmax" if kind == "full_attention" else "linear" for kind in self.layer_types]
        if isinstance(pattern, str):
            pattern = [pattern]
        check_names("mixer", pattern, [*_OTHER_MIXERS, *rules.names()])
        if not pattern or self.num_hidden_layers % len(pattern):
            raise ValueError(
                f"mixers lists {len(pattern)} layers, which does not divide num_hidden_layers = "
                f"{self.num_hidden_layers}; give one mixer per layer, or a pattern that repeats evenly"
            )
        repeated = list(pattern) * (self.num_hidden_layers // len(pattern))
        return [self.rule if mixer == "linear" else mixer for mixer in repeated]

    def _resolve_heads(self, heads: str, key_heads: str, width: str) -> None:
        """Give the heads an equal share of the hidden size by default, and check that they share the key heads equally."""
        num_heads, num_key_heads = getattr(self, heads), getattr(self, key_heads)
        if getattr(self, width) is None:
            if self.hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} does not divide into {heads} = {num_heads} heads; "
                    f"choose another number of heads or give {width}"
                )
            setattr(self, width, self.hidden_size // num_heads)
        if num_heads % num_key_heads:
            raise ValueError(
                f"{heads} = {num_heads} is not a multiple of {key_heads} = {num_key_heads}; "
                "each key head serves the same number of heads"
            )


def _reject_misspelt(kwargs: dict[str, Any], config: EflaConfig) -> None:
    """Reject unknown keys that look like a field of ours; transformers keeps other unknown keys as attributes."""
    known = list(type(config).__annotations__)
    for key in kwargs:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if near and key not in config.attribute_map:
            raise ValueError(f"unknown key {key!r} in EflaConfig; did you mean {near[0]!r}?")


register_when_loaded()
