"""Saving and loading: the same model in another process, and an error that names what does not fit."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import efla  # noqa: F401
from efla.models import (
    EflaConfig,
    EflaForCausalLM,
    EflaForSequenceClassification,
    EflaModel,
    register_when_loaded,
)
from efla.models.tokenizer import ByteTokenizer
from tests.fresh import run_fresh
from tests.models.tiny import ALL, MAIN, logits_of, random_tokens, tiny_config, tiny_model

register_when_loaded()


def _fields(config):
    return {
        key: value for key, value in config.to_dict().items() if key not in ("dtype", "architectures", "_name_or_path")
    }


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
def test_a_loaded_model_is_the_saved_one(fields, tmp_path):
    model, tokens = tiny_model(**fields), random_tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors", ".md", ".py"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is EflaForCausalLM
    assert not loaded.training
    assert _fields(loaded.config) == _fields(model.config)
    assert torch.equal(logits_of(loaded, tokens), logits_of(model, tokens))


def test_a_new_process_loads_and_runs_it_through_auto_classes(tmp_path):
    model, tokens = tiny_model(**MAIN["hybrid"]), random_tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    save_file({"tokens": tokens}, tmp_path / "in.safetensors")
    code = """
import sys, torch
import efla.models; efla.models.register_when_loaded()
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model").double()
with torch.no_grad():
    logits = model(load_file(sys.argv[1] + "/in.safetensors")["tokens"]).logits
save_file({"logits": logits}, sys.argv[1] + "/out.safetensors")
"""
    run_fresh(code, tmp_path).check_returncode()
    logits = load_file(tmp_path / "out.safetensors")["logits"]
    torch.testing.assert_close(logits, logits_of(model.double(), tokens), atol=1e-10, rtol=0)


STOCK = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
folder = sys.argv[1]
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
except ValueError as error:
    print(error)
class Missing:
    def find_spec(self, name, *_):
        if name == "efla":
            raise ModuleNotFoundError("No module named 'efla'")
sys.meta_path.insert(0, Missing())
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
except ImportError as error:
    print(error)
del sys.meta_path[0]
assert "efla" not in sys.modules
generate = pipeline("text-generation", model=folder, tokenizer=folder, trust_remote_code=True, device="cpu")
text = generate("A byte", do_sample=False, max_new_tokens=5)[0]["generated_text"]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
model.save_pretrained(folder + "/again")
print(json.dumps([text, type(model).__module__, AutoTokenizer.from_pretrained(folder).encode("A")]))
"""


def test_tools_that_never_import_efla_open_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model, tokenizer = tiny_model(vocab_size=256), ByteTokenizer()
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    done = run_fresh(STOCK, tmp_path / "m")
    assert done.returncode == 0, done.stderr
    refused, found = done.stdout.strip().rsplit("\n", 1)
    assert "trust_remote_code=True" in refused and "pip install efla" in refused
    tokens = torch.tensor([tokenizer.encode("A byte")])
    expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=5)
    text = tokenizer.decode(expected[0], skip_special_tokens=True)
    assert json.loads(found) == [text, "efla.models.modeling_efla", [0, 65]]
    for name in ("config.json", "modeling_efla.py"):  # saved again by such a tool
        assert (tmp_path / "m/again" / name).read_text() == (tmp_path / "m" / name).read_text()
    assert len((tmp_path / "m/modeling_efla.py").read_text().splitlines()) == 1


HARNESS = """
import functools, sys
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
# Without the 14,000 files of its own tasks, which it would read for twenty seconds.
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
assert "efla" not in sys.modules
cli_evaluate()
"""
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: RECORDS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{metric: acc}]
"""


def test_lm_evaluation_harness_scores_the_folder_without_an_import_of_ours(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    model, tokenizer, folder = tiny_model(vocab_size=256), ByteTokenizer(), tmp_path / "m"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    records = [{"text": "To be or", "choices": [" not", " be"], "label": n} for n in (0, 1)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("RECORDS", json.dumps(str(tmp_path / "records.jsonl"))))
    command = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True", "--device", "cpu"]
    done = run_fresh(
        HARNESS, *command, "--tasks", tmp_path / "tiny.yaml", "--output_path", tmp_path / "out", "--log_samples"
    )
    assert done.returncode == 0, done.stderr
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    for choices in found:
        for choice, (log_likelihood, _) in zip(records[0]["choices"], choices, strict=True):
            tokens = torch.tensor([tokenizer.encode("To be or" + choice)])
            log_p = logits_of(model, tokens)[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])
            assert float(log_likelihood) == pytest.approx(float(log_p[-len(choice) :].sum()), abs=1e-4)
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["tiny"]["acc,none"] == 0.5


def test_sharded_weights_load(tmp_path):
    model, tokens = tiny_model(), random_tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(EflaForCausalLM.from_pretrained(tmp_path), tokens), logits_of(model, tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_or_chosen(dtype, tmp_path):
    model = tiny_model().to(dtype)
    model.save_pretrained(tmp_path)
    assert EflaForCausalLM.from_pretrained(tmp_path).dtype == dtype
    assert EflaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32
    logits = EflaForCausalLM.from_pretrained(tmp_path)(random_tokens(1, 5)).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_tied_embeddings_are_one_tensor_before_and_after(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = EflaForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_the_body_moves_between_tasks_and_only_the_head_is_new(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "lm")
    body = AutoModel.from_pretrained(tmp_path / "lm")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
    assert type(body) is EflaModel
    assert type(classifier) is EflaForSequenceClassification
    for loaded in (body, classifier.model):
        for name, p in model.model.named_parameters():
            assert torch.equal(loaded.get_parameter(name), p), name
    assert classifier.score.weight.shape == (3, 32)
    classifier.save_pretrained(tmp_path / "classifier")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
    assert torch.equal(again.score.weight, classifier.score.weight)


def _edit(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mixer.k_proj.weight"),
            r"1 tensors missing: model\.layers\.1\.mixer\.k_proj\.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight"),
        (lambda t: t.update({"model.extra": torch.ones(2)}), r"1 tensors unexpected: model\.extra"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            r"model\.norm\.weight is \[7\] in the file, \[32\] in the",
        ),
    ],
    ids=["missing", "missing-head", "unexpected", "other-shape"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(change, message, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    _edit(tmp_path, change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_with_gaps_loads_when_told_to(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    _edit(tmp_path, lambda t: t.pop("model.layers.1.mixer.k_proj.weight"))
    model = EflaForCausalLM.from_pretrained(tmp_path, strict=False)
    assert model.model.layers[1].mixer.k_proj.weight.isfinite().all()


@pytest.mark.parametrize("kept", [0, 5, 300, -100])
def test_a_truncated_file_is_named(kept, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged .*copy or download it again"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_pickled_weights_are_not_loaded(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        EflaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="safetensors only"):
        EflaForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


def test_the_model_card_says_what_the_model_is_and_is_not_overwritten(tmp_path):
    model = tiny_model(**MAIN["hybrid"])
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    head = card.split("---")[1]
    assert "library_name: transformers" in head
    assert "pipeline_tag: text-generation" in head
    assert "- softmax" in head
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in card
    assert "3 of efla, 1 of softmax" in card
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_device_map_places_the_model(tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("device_map needs the package accelerate")
    model, tokens = tiny_model(), random_tokens(2, 5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens.to(loaded.device)).logits.cpu(), model(tokens).logits)


def test_a_config_survives_json(tmp_path):
    config = tiny_config(**MAIN["hybrid"])
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is EflaConfig
    assert _fields(loaded) == _fields(config)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "efla"
    assert written["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


def test_transformers_trainer_trains_evaluates_and_resumes(tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers' Trainer needs the package accelerate")
    from transformers import Trainer, TrainingArguments

    model = tiny_model(**MAIN["hybrid"])
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(16, 12)]
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    arguments = TrainingArguments(
        tmp_path,
        max_steps=6,
        save_steps=3,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    shapes = []
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:4],
        compute_metrics=lambda p: shapes.append(p.predictions.shape) or {},
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert shapes[-1] == (4, 12, 97)
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")).global_step == 6


def test_auto_classes_know_us_when_transformers_loads_them_in_the_middle_of_a_model(tmp_path):
    """Importing a modelling file first makes transformers load its Auto classes half way through another module."""
    code = f"""
import warnings; warnings.simplefilter("error", RuntimeWarning)
import efla
import transformers.models.qwen3_next.modeling_qwen3_next
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_config(efla.presets.get("efla-tiny")).save_pretrained({str(tmp_path)!r})
print(type(AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})).__name__)
"""
    done = run_fresh(code)
    assert done.stdout.strip().endswith("EflaForCausalLM"), done.stderr
