"""The same fine-tuning on a CPU with transformers' Trainer, with accelerate, or with trl's SFTTrainer.

    python examples/finetune_tools.py trainer --model FOLDER --text FILE --output tuned

All weights are trained, on packed text; see finetune_lora.py for adapters. Each function is complete: copy the one you need.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from finetune_lora import packed_batches, read_documents
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorWithFlattening, Trainer, TrainingArguments

import efla  # noqa: F401  (AutoModelForCausalLM then knows EFLA models)
from efla.integrations.transformers import accelerate_cpu


def with_trainer(model, tokenizer, text: Path, output: Path, steps: int) -> None:
    model.config.use_cache = False  # packed sequences take no cache
    options = TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        remove_unused_columns=False,
    )  # fmt: skip
    documents = read_documents(tokenizer, text, 512)
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    trainer = Trainer(model=model, args=options, train_dataset=documents, data_collator=collate)
    trainer.train()
    trainer.save_model()


def with_accelerate(model, tokenizer, text: Path, output: Path, steps: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-4))
    batches = packed_batches(read_documents(tokenizer, text, 512), tokens=512)
    for _, batch in zip(range(steps), batches, strict=False):
        accelerator.backward(model(**batch, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.unwrap_model(model).save_pretrained(output)


def with_trl(model, tokenizer, text: Path, output: Path, steps: int) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    lines = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()]
    options = SFTConfig(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=2, max_length=128, packing=False,
        use_cpu=True, bf16=False, report_to=[],
    )  # fmt: skip
    data = Dataset.from_dict({"text": lines})
    trainer = SFTTrainer(model=model, args=options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()


TOOLS = {"trainer": with_trainer, "accelerate": with_accelerate, "trl": with_trl}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model)
    with accelerate_cpu():
        TOOLS[options.tool](model, tokenizer, options.text, options.output, options.steps)


if __name__ == "__main__":
    main()
