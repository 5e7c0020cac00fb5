"""Small models for the evaluation tests: each rule family trained for some steps on bytes, a transformers architecture
with random weights, and one whose answer is known."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from efla.evaluation.run import EvaluationSettings, TaskEvaluation
from efla.models import EflaConfig, EflaForCausalLM

FAMILIES: dict[str, dict[str, Any]] = {
    "efla": {"rule": "efla"},
    "gated_efla": {"rule": "gated_efla"},
    "delta": {"rule": "delta"},
    "gated_delta": {"rule": "gated_delta"},
    "mamba2": {"mixers": ["mamba2"], "intermediate_size": 0},
    "softmax": {"mixers": ["softmax"]},
    "hybrid": {"mixers": ["efla", "softmax"]},
}
TEXT = (
    "Question: which letter comes after the first one, and why is it so?\nAnswer: the second letter, as it is called. "
    "A man is sitting on a roof. He starts pulling up roofing on a roof. The passage says that water boils when it is hot. "
) * 3


def byte_config(**fields: Any) -> EflaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "num_attention_heads": 2,
        "mamba_head_dim": 16,
        "mamba_state_size": 8,
        "intermediate_size": 48,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "max_position_embeddings": 256,
    }
    return EflaConfig(**{**sizes, **fields})


@cache
def trained(family: str, steps: int = 20) -> EflaForCausalLM:
    """A byte model of the family after some AdamW steps on a little text; deterministic."""
    torch.manual_seed(0)
    model = EflaForCausalLM(byte_config(**FAMILIES[family]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = torch.tensor([0, *TEXT.encode()])
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(stream) - 65, (4,), generator=generator)
        rows = torch.stack([stream[i : i + 64] for i in starts.tolist()])
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def llama(vocab_size: int = 256) -> Any:
    """A real transformers architecture, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def word_tokenizer() -> Any:
    """An ordinary tokenizer of transformers: words, with a bos put first."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


class UniformLM(nn.Module):
    """Every token equally likely, whatever came before."""

    def __init__(self, vocab_size: int = 256) -> None:
        super().__init__()
        self.config = byte_config(vocab_size=vocab_size)
        self.weight = nn.Parameter(torch.zeros(1))

    device = torch.device("cpu")
    dtype = torch.float32

    def tie_weights(self) -> None:
        pass

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> CausalLMOutputWithPast:
        return CausalLMOutputWithPast(logits=self.weight * torch.ones(*input_ids.shape, self.config.vocab_size))


def data_folder() -> Path:
    """The folder of real data, or a skip that says why."""
    given = os.environ.get("EFLA_DATA")
    if not given or not (Path(given) / "eval").is_dir():
        pytest.skip("EFLA_DATA names no folder with the evaluation sets (eval/, lambada/, wikitext-2/)")
    return Path(given)


def quiet_console() -> Console:
    return Console(quiet=True)


def models_of(root: Path, *names: str) -> list[str]:
    return [str(root / "models" / name) for name in names]


def evaluate(models: list[str], settings: EvaluationSettings, output: Path, console: Console) -> list[dict[str, Any]]:
    return TaskEvaluation(settings).evaluate(models, output, console)
