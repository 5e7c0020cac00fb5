"""The fine-tuning examples on tiny models with random weights: they train, and write what loads again."""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import AutoModelForCausalLM

import efla
from efla.models.tokenizer import ByteTokenizer
from tests.integrations.test_doors import HYBRID
from tests.integrations.test_transformers import small_model

FAMILIES = ["efla", "qwen3_5"]
LINES = (
    "To be, or not to be.\nThat is the question:\nWhether 'tis nobler in the mind to suffer\nThe slings and arrows.\n"
)


@pytest.fixture(params=FAMILIES)
def options(request, tmp_path, monkeypatch):
    """The command line of an example: a tiny model with the byte tokenizer, four documents, and where to write."""
    monkeypatch.syspath_prepend(str(request.config.rootpath / "examples"))
    torch.manual_seed(0)
    if request.param == "efla":
        model = efla.EflaForCausalLM(efla.presets.get("efla-tiny", num_hidden_layers=1))
    else:
        model = small_model(request.param, vocab_size=256, **HYBRID)
    model.save_pretrained(tmp_path / "model")
    ByteTokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(LINES)
    return [
        f"--model={tmp_path / 'model'}", f"--text={tmp_path / 'text.txt'}", f"--output={tmp_path / 'tuned'}",
    ]  # fmt: skip


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_lora_lowers_the_loss_and_saves_adapters_alone(options, tmp_path):
    peft = pytest.importorskip("peft")
    losses = importlib.import_module("finetune_lora").main([*options, "--steps=12", "--tokens=64", "--rate=0.02"])
    assert sum(losses[-3:]) < sum(losses[:3])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([list(b"To be")])
    with torch.no_grad():
        before = plain(ids).logits
        tuned = peft.PeftModel.from_pretrained(plain, tmp_path / "tuned").eval()
        assert not torch.equal(tuned(ids).logits, before)
    adapters = peft.load_peft_weights(str(tmp_path / "tuned"))
    assert adapters and all("lora_" in name for name in adapters)


@pytest.mark.parametrize("tool", ["trainer", "accelerate", "trl"])
def test_other_tools_train_the_model_and_save_it(tool, options, tmp_path):
    pytest.importorskip("trl" if tool == "trl" else "accelerate")
    importlib.import_module("finetune_tools").main([tool, *options, "--steps=2"])
    before, after = weights(tmp_path / "model"), weights(tmp_path / "tuned")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > len(before) / 2


def test_packed_batches_hold_whole_documents(options):
    example = importlib.import_module("finetune_lora")
    documents = [{"input_ids": list(range(n))} for n in (5, 3, 9, 4)]
    batches = example.packed_batches(documents, 8)
    lengths = []
    while len(lengths) < 4:  # one round over the documents
        boundaries = next(batches)["cu_seq_lens_q"]
        lengths += boundaries.diff().tolist()
    assert sorted(lengths) == [3, 4, 5, 9]
