"""One decoder for every mixer: embedding, blocks, norm, head, and the next-token loss.

Shapes: B batch, T tokens, d hidden size, N packed sequences.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from efla.layers import LinearAttention, Mamba2, RMSNorm, ShortConvolution, SoftmaxAttention
from efla.layers.linear import apply_linear, is_plain
from efla.models import cache as caches
from efla.models import register_when_loaded
from efla.models.block import EflaBlock
from efla.models.configuration_efla import EflaConfig
from efla.models.inputs import check_token_ids, find_packing, local_padding_mask, positions_of_packed
from efla.models.saving import CheckpointMixin
from efla.native import rows
from efla.native.rows import is_plain_tensor

IGNORED = -100
"""The label of tokens that are not predicted."""


class EflaPreTrainedModel(CheckpointMixin, PreTrainedModel):
    """Initialisation, and what transformers needs to know about the models."""

    config_class = EflaConfig
    config: EflaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EflaBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": EflaBlock,
        "attentions": OutputRecorder(SoftmaxAttention, index=1),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Linear maps, convolutions and embeddings normal(0, 0.02), biases 0, gains 1.

        Exceptions: the gates' parameters, Mamba-2's output map, and convolutions with ``conv_init="default"``.
        """
        if isinstance(module, ShortConvolution):
            module.reset_parameters(self.config.conv_init, self.config.initializer_range)
        elif isinstance(module, (LinearAttention, Mamba2)):
            for name, value in module.initial_values().items():
                init.copy_(module.get_parameter(name), value)
        else:
            super()._init_weights(module)


class EflaModel(EflaPreTrainedModel):
    """Token ids [B, T] to hidden states [B, T, d]."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(EflaBlock(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the blocks, continuing from the cache if there is one.

        attention_mask: [B, T], or [B, past + T] with a cache; zero at padding, which never changes real tokens.
        cu_seqlens: [N + 1] boundaries of packed sequences in the flattened [B * T] axis, including each row's start.
            ``position_ids`` that restart, without attention_mask, say the same (as transformers' collators do).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            # An adapter around the embedding (PEFT) may not have num_embeddings.
            num_tokens = getattr(self.embed_tokens, "num_embeddings", self.config.vocab_size)
            check_token_ids(cast(Tensor, input_ids), num_tokens)
            inputs_embeds = self.embed_tokens(input_ids)
        B, T = inputs_embeds.shape[:2]
        layer_types = cast(list[str], self.config.layer_types)
        has_linear, has_softmax = "linear_attention" in layer_types, "full_attention" in layer_types
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if self.gradient_checkpointing and self.training:
            use_cache = False
        cu_seqlens = find_packing(attention_mask, position_ids, past_key_values, cu_seqlens, B, T, kwargs)
        if cu_seqlens is not None:
            if past_key_values is not None:
                raise ValueError("packed sequences (cu_seqlens) cannot continue from a cache; pass one at a time")
            use_cache = False
            position_ids = positions_of_packed(cu_seqlens, B, T) if position_ids is None else position_ids
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            caches.adopt(past_key_values, self, layer_types)

        mask = local_padding_mask(attention_mask, T) if has_linear else None
        causal_mask = None
        if has_softmax:
            if isinstance(attention_mask, dict):
                causal_mask = attention_mask["full_attention"]
            else:
                causal_mask = create_causal_mask(
                    config=self.config,
                    inputs_embeds=inputs_embeds,
                    attention_mask=attention_mask,
                    past_key_values=past_key_values,
                    position_ids=position_ids,  # only used to find packed sequences
                )
            position_ids = self._positions(position_ids, attention_mask, past_key_values, T, inputs_embeds.device)
        hidden = inputs_embeds
        if self.config.residual_in_fp32:
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        for layer in self.layers:
            hidden = layer(
                hidden,
                mask=mask,
                causal_mask=causal_mask,
                position_ids=position_ids,
                cu_seqlens=cu_seqlens,
                past_key_values=past_key_values,
                **kwargs,
            )
        caches.count_tokens(past_key_values, T)
        hidden = self.norm(hidden).to(self.norm.weight.dtype)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values if use_cache else None)

    def _positions(
        self,
        position_ids: Tensor | None,
        attention_mask: Tensor | dict[str, Any] | None,
        past_key_values: Cache | None,
        length: int,
        device: torch.device,
    ) -> Tensor:
        """Positions [B or 1, T]: as given, else counted over real tokens, else over all."""
        if position_ids is not None:
            return position_ids
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
        return (torch.arange(length, device=device) + caches.seen_tokens(past_key_values))[None]


class EflaForCausalLM(EflaPreTrainedModel, GenerationMixin):
    """Language model: logits [B, T, vocabulary], and the next-token loss of ``labels``."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.model = EflaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Predict the next token. labels: [B, T], shifted here; -100 is not predicted.

        shift_labels (by keyword): [B, T], already shifted, in place of labels: the token that follows each token.

        skip_logits: with labels, compute the loss chunk by chunk and return ``logits=None``; default while training.
            A vocabulary of 32,000 then costs loss_chunk_size * 32,000 numbers, not B * T * 32,000.
        logits_to_keep: logits of the last so many tokens only (0: all), or of the positions given.
        Arguments otherwise as in :class:`EflaModel`. A packed sequence's first token is never a label.
        """
        # Not a named parameter: transformers' Trainer expects a batch to contain every parameter called a label.
        shift_labels = kwargs.pop("shift_labels", None)
        source = input_ids if input_ids is not None else inputs_embeds
        if labels is not None and source is not None:
            B, T = source.shape[:2]
            cu_seqlens = find_packing(attention_mask, position_ids, past_key_values, cu_seqlens, B, T, kwargs)
            if cu_seqlens is not None:
                labels = labels.masked_fill(positions_of_packed(cu_seqlens, B, T) == 0, IGNORED)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None and shift_labels is not None:
            raise ValueError("pass labels or shift_labels, not both")
        targets = labels if shift_labels is None else shift_labels
        if targets is not None:
            loss = next_token_loss(
                hidden,
                self.lm_head,
                targets,
                chunk_size=self.config.loss_chunk_size,
                num_items=num_items_in_batch,
                shift=shift_labels is None,
            )
        if targets is None or not (self.training if skip_logits is None else skip_logits):
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = apply_linear(hidden[:, keep], self.lm_head)
        return CausalLMOutputWithPast(
            loss=cast(Any, loss),
            logits=cast(Any, logits),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        done = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        caches.add_methods(model_kwargs.get("past_key_values"))
        return done


def next_token_loss(
    hidden: Tensor,
    head: nn.Module | Tensor,
    labels: Tensor,
    *,
    chunk_size: int,
    num_items: int | Tensor | None = None,
    shift: bool = True,
) -> Tensor:
    """Mean over tokens of -log softmax(head(h_t))[label_{t+1}], with logits of ``chunk_size`` tokens at a time.

    hidden: [B, T, d]; labels: [B, T], -100 where nothing is to be predicted.
    head: a module that maps [1, n, d] to [1, n, vocabulary], or the weight [vocabulary, d] of a linear map.
    num_items: divide by this instead of the number of labels (gradient accumulation over uneven batches).
    The backward pass recomputes each chunk's logits, so memory is chunk_size * vocabulary, not T * vocabulary.
    """
    if shift:
        labels = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    if isinstance(head, nn.Module):
        head = _plain_weight(head)
    has_own_code = isinstance(head, nn.Module)  # a LoRA adapter's dropout must draw the same numbers again
    flat_hidden = hidden.reshape(-1, hidden.shape[-1])
    flat_labels = labels.reshape(-1).to(hidden.device)
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    for start in range(0, flat_hidden.shape[0], chunk_size):
        piece = flat_hidden[start : start + chunk_size], head, flat_labels[start : start + chunk_size]
        if torch.is_grad_enabled():
            total = total + checkpoint(_summed_loss, *piece, use_reentrant=False, preserve_rng_state=has_own_code)
        else:
            total = total + _summed_loss(*piece)
    if num_items is None:
        num_items = (flat_labels != IGNORED).sum()
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items


def _plain_weight(head: nn.Module) -> nn.Module | Tensor:
    """The weight of a head that is a plain product; any other head unchanged.

    The backward pass recomputes the logits; given the weight, it uses the same one as the forward pass, also under
    ``torch.func.functional_call``.
    """
    # A parametrized head is of another class.
    has_weight = is_plain(head, nn.Linear) and head.bias is None and is_plain_tensor(head.weight)
    return cast(Tensor, head.weight) if has_weight else head


def _summed_loss(hidden: Tensor, head: nn.Module | Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden[None])[0] if isinstance(head, nn.Module) else rows.linear(hidden, head)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")


class EflaForSequenceClassification(GenericForSequenceClassification, EflaPreTrainedModel):  # type: ignore[misc]
    """Class scores [B, num_labels] from the last real token's hidden state."""

    def __init__(self, config: EflaConfig) -> None:
        EflaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = EflaModel(config)
        self.score = nn.Linear(config.hidden_size, cast(int, config.num_labels), bias=False)
        self.post_init()


register_when_loaded()
