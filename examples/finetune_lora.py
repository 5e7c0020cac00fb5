"""Fine-tune a linear-attention model on a CPU with LoRA adapters and packed text.

    python examples/finetune_lora.py --model FOLDER --text FILE --output adapters

FOLDER is a local Hugging Face folder: Qwen3-Next, Qwen3.5, OLMo-hybrid or an EFLA model. FILE holds one document per line.
Documents are packed into rows without padding; the layers keep them apart. Needs peft.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening

import efla  # noqa: F401  (AutoModelForCausalLM then knows EFLA models)
from efla.integrations.transformers import accelerate_cpu

MLP = ["gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "efla": ["q_proj", "k_proj", "v_proj", "o_proj", *MLP],
    "qwen": ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", *MLP],
}
"""Linear maps that get adapters, by family. Projections of beta and of the gate are small and stay as they are."""


def read_documents(tokenizer, path: Path, length: int) -> list[dict[str, list[int]]]:
    """The documents of a text file as token ids, each at most ``length`` tokens."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{"input_ids": ids} for ids in tokenizer(lines, truncation=True, max_length=length)["input_ids"]]


def packed_batches(documents: list[dict[str, list[int]]], tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of whole documents with about ``tokens`` tokens each, over and over."""
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    while True:
        batch, size = [], 0
        for i in torch.randperm(len(documents)).tolist():
            batch.append(documents[i])
            size += len(documents[i]["input_ids"])
            if size >= tokens:
                yield collate(batch)
                batch, size = [], 0
        if batch:
            yield collate(batch)


def add_adapters(model, rank: int = 8):
    """The model with LoRA adapters; only they are trained."""
    family = "efla" if model.config.model_type == "efla" else "qwen"
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    targets = [name for name in TARGETS[family] if name in names]
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=1e-3)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = add_adapters(AutoModelForCausalLM.from_pretrained(options.model)).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.rate)
    batches = packed_batches(read_documents(tokenizer, options.text, options.tokens), options.tokens)
    losses = []
    with accelerate_cpu():
        for step, batch in zip(range(options.steps), batches, strict=False):
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % 10 == 0:
                print(f"step {step}: loss {losses[-1]:.3f}")
    model.save_pretrained(options.output)  # the adapters alone; peft.PeftModel.from_pretrained loads them
    return losses


if __name__ == "__main__":
    main()
