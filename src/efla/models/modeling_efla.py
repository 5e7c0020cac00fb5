"""One decoder for every mixer: embedding, blocks of mixer and SwiGLU, norm, head, and the next-token loss.

Shapes: B batch, T tokens, d hidden size, N packed sequences.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GenericForSequenceClassification, GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from efla.layers import LinearAttention, Mamba2, RMSNorm, ShortConvolution, SoftmaxAttention, SwiGLU
from efla.layers.blocks import apply_linear, is_plain, plain_weights
from efla.layers.softmax_attention import eager_attention
from efla.models import cache as caches
from efla.models import register_when_loaded
from efla.models.configuration_efla import EflaConfig
from efla.models.inputs import check_token_ids, find_packing, local_padding_mask, positions_of_packed
from efla.models.saving import CheckpointMixin
from efla.native import rows
from efla.scans.backends import native

IGNORED = -100
"""The label of tokens that are not predicted."""


def build_mixer(config: EflaConfig, layer_idx: int) -> nn.Module:
    """The token mixer of one layer, a layer of :mod:`efla.layers` with the configuration's sizes."""
    mixer = cast(list[str], config.mixers)[layer_idx]
    if mixer == "softmax":
        return SoftmaxAttention(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.attention_head_dim,
            rope_theta=config.rope_theta,
        )
    shared: dict[str, Any] = {
        "conv_size": config.conv_size,
        "eps": config.norm_eps,
        "backend": config.backend,
        "chunk_size": config.chunk_size,
    }
    if mixer == "mamba2":
        return Mamba2(
            config.hidden_size,
            expand=config.mamba_expand,
            head_dim=config.mamba_head_dim,
            state_size=config.mamba_state_size,
            num_groups=config.mamba_num_groups,
            num_blocks=config.num_hidden_layers,
            **shared,
        )
    return LinearAttention(
        config.hidden_size,
        rule=mixer,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        head_dim=cast(int, config.head_dim),
        value_head_dim=config.value_head_dim,
        key_norm=config.key_norm,
        query_norm=config.query_norm,
        output_gate=config.output_gate,
        gate=config.gate,
        allow_neg_eigval=config.allow_neg_eigval,
        **shared,
    )


class EflaBlock(GradientCheckpointingLayer):  # type: ignore[misc]
    """x = x + mixer(RMSNorm(x)); x = x + mlp(RMSNorm(x)), the second only with an MLP. x: [B, T, d]."""

    def __init__(self, config: EflaConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = build_mixer(config, layer_idx)
        if config.intermediate_size:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden: Tensor,
        *,
        mask: Tensor | None = None,
        causal_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if hidden.shape[1] == 1 and mask is None and cu_seqlens is None and past_key_values is not None:
            stepped = self._step(hidden, past_key_values)
            if stepped is not None:
                return stepped
        x = self.mixer_norm(hidden).to(self.mixer_norm.weight.dtype)
        if isinstance(self.mixer, SoftmaxAttention):
            update = None if past_key_values is None else partial(past_key_values.update, layer_idx=self.layer_idx)
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
            y, _ = self.mixer(
                x, position_ids=position_ids, mask=causal_mask, update_cache=update, attend=attend, **kwargs
            )
        else:
            log = caches.recording_layer(past_key_values, self.layer_idx, self.mixer)
            if log is not None and x.shape[1] > caches.REWINDABLE:
                split = x.shape[1] - caches.REWINDABLE  # the last tokens apart, so that they can be taken back
                masks = (None, None) if mask is None else (mask[:, :split], mask[:, split:])
                log.segments.clear()
                first = self._mix(x[:, :split], masks[0], None, past_key_values, None)
                y = torch.cat([first, self._mix(x[:, split:], masks[1], None, past_key_values, log)], dim=1)
            else:
                y = self._mix(x, mask, cu_seqlens, past_key_values, log)
        hidden = hidden + y
        if self.config.intermediate_size:
            hidden = hidden + self.mlp(self.mlp_norm(hidden).to(self.mlp_norm.weight.dtype))
        return hidden

    def _step(self, hidden: Tensor, cache: Cache) -> Tensor | None:
        """The output for one token, [B, 1, d], with one kernel call for the whole block; the state is updated in place.

        ``None`` where the kernel does not apply: with another mixer, gradients or a log of the last tokens, or if a module has
        hooks, an adapter or another class. It reads the parameters at each call, so it sees them as they are.
        """
        mixer, mlp = cast(Any, self.mixer), getattr(self, "mlp", None)
        norms = self.mixer_norm, None if mlp is None else self.mlp_norm
        if (
            not is_plain(mixer, LinearAttention)
            or (mlp is not None and not is_plain(mlp, SwiGLU))
            or any(norm is not None and not is_plain(norm, RMSNorm) for norm in norms)
            or hidden.shape[0] > rows.MAX_PRODUCT_ROWS
            or caches.recording_layer(cache, self.layer_idx, mixer) is not None
        ):
            return None
        step = mixer.decoding_step(hidden, caches.read_state(cache, self.layer_idx, hidden.shape[0]))
        maps = (*mixer.projections(), mixer.o_proj)
        weights = plain_weights(maps if mlp is None else (*maps, mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        if step is None or weights is None:
            return None
        gains = [None if norm is None else rows.gain(norm.weight, hidden) for norm in norms]
        mlp_weights = weights[7:] or [None] * 3
        y = torch.empty_like(hidden)
        done = native.step_in_place(
            "block_step", step.states, hidden, gains[0], *weights[:7], gains[1], *mlp_weights, *step.tensors, y,
            *step.settings, *(0.0 if norm is None else norm.eps for norm in norms),
        )  # fmt: skip
        return y if done else None

    def _mix(
        self,
        x: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: Cache | None,
        log: caches.RewindableLayer | None,
    ) -> Tensor:
        """Run a recurrent mixer on x [B, T, d], from the state in the cache and back into it."""
        state = caches.read_state(cache, self.layer_idx, x.shape[0])
        options: dict[str, Any] = {} if log is None else {"record": partial(log.record, mask, state)}
        if state is not None:
            options["inplace_state"] = True
        y, state = self.mixer(
            x, mask=mask, cu_seqlens=cu_seqlens, state=state, output_state=cache is not None, **options
        )
        if cache is not None and state is not None:
            caches.write_state(cache.layers[self.layer_idx], state)
        return cast(Tensor, y)


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
            logits=logits,
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
    """The weight of a head that only calls ``functional.linear``; any other head unchanged.

    The backward pass recomputes the logits; given the weight, it uses the same one as the forward pass, also under
    ``torch.func.functional_call``.
    """
    is_plain = (
        type(head) is nn.Linear  # neither a subclass nor parametrized, which makes one
        and head.bias is None
        and type(head.weight) in (Tensor, nn.Parameter)
        and "forward" not in vars(head)
        and not (head._forward_pre_hooks or head._forward_hooks or head._backward_pre_hooks or head._backward_hooks)
        and not _has_any_global_hook()
    )
    return head.weight if is_plain else head


def _summed_loss(hidden: Tensor, head: nn.Module | Tensor, labels: Tensor) -> Tensor:
    logits = head(hidden[None])[0] if isinstance(head, nn.Module) else functional.linear(hidden, head)
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
