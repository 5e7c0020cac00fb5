"""Our model in the harness: item by item the scores of the harness's own class for transformers models."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from efla.evaluation import ByteTokenizer, ContinuationScore, Request, carried_log_likelihoods, score, tasks
from efla.evaluation.items import metric_items
from efla.evaluation.perplexity import why_not_carried
from efla.evaluation.responses import ResponseLog
from efla.evaluation.tasks import PAPER_TASKS
from tests.evaluation.models import FAMILIES, TEXT, UniformLM, data_folder, llama, trained, word_tokenizer
from tests.evaluation.small_data import write_small_data

pytest.importorskip("lm_eval", reason="the extra 'eval' is not installed")

from lm_eval.models.huggingface import HFLM

from efla.evaluation.harness import HarnessModel, item_records, run_task, sharing_agrees, wikitext_items

MODELS = [*FAMILIES, "llama"]


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    return write_small_data(tmp_path_factory.mktemp("data") / "data")


def model_of(name: str, vocab_size: int = 256) -> Any:
    """In float64: float32 sums of a thousand log-probabilities differ by more than 1e-4 from CPU to CPU."""
    return copy.deepcopy(llama(vocab_size) if name == "llama" else trained(name)).double()


def instances(data: Path, limit: int | None = None, names: tuple[str, ...] = PAPER_TASKS) -> dict[str, list[Any]]:
    """Requests of the tasks by kind."""
    found: dict[str, list[Any]] = {"loglikelihood": [], "loglikelihood_rolling": []}
    with tasks.silence_lm_eval():
        for name in names:
            task = tasks.load_task(name, data, limit)
            task.build_all_requests(rank=0, world_size=1)
            for instance in task.instances:
                found[instance.request_type].append(instance)
    return found


def plain_harness(model: Any, tokenizer: Any, **options: Any) -> HFLM:
    with tasks.silence_lm_eval():
        return HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4, max_length=256, **options)


@pytest.mark.parametrize("name", MODELS)
def test_all_ten_tasks_score_as_the_plain_harness_does(name, small_data):
    """Log-likelihoods to 1e-4, item by item, on the requests of all ten tasks."""
    model = model_of(name)
    asked = instances(small_data)
    ours = HarnessModel(model, ByteTokenizer(), max_length=256, batch_tokens=600)
    plain = plain_harness(model, ByteTokenizer())
    assert len(asked["loglikelihood"]) > 40
    with tasks.silence_lm_eval():
        expected = plain.loglikelihood(asked["loglikelihood"])
        # Bytes get no second bos before a text in windows.
        windows = plain_harness(model, ByteTokenizer(), add_bos_token=False)
        rolling = windows.loglikelihood_rolling(asked["loglikelihood_rolling"])
    found = ours.loglikelihood(asked["loglikelihood"])
    assert ours.share
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert ours.loglikelihood_rolling(asked["loglikelihood_rolling"]) == pytest.approx(rolling, abs=1e-4)


@pytest.mark.parametrize("name", ["efla", "hybrid", "llama"])
def test_long_and_truncated_items_of_the_real_sets(name):
    """Contexts longer than the model's window, as BoolQ's are in bytes, are cut as the harness cuts them."""
    asked = instances(data_folder(), 3, ("lambada_openai", "hellaswag", "winogrande", "boolq"))["loglikelihood"]
    model = model_of(name)
    ours = HarnessModel(model, ByteTokenizer(), max_length=256)
    assert max(len(request.args[0]) for request in asked) > 256
    with tasks.silence_lm_eval():
        expected = plain_harness(model, ByteTokenizer()).loglikelihood(asked)
    found = ours.loglikelihood(asked)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_a_foreign_recurrent_model_is_scored_or_left_out_but_never_wrongly(small_data):
    """transformers' Mamba-2 keeps its state under another name: plain scores, and no carried state that is not one."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "expand": 2, "num_heads": 4, "head_dim": 16, "state_size": 8}
    config = Mamba2Config(vocab_size=256, n_groups=1, chunk_size=16, bos_token_id=0, eos_token_id=0, **sizes)
    model = Mamba2ForCausalLM(config).eval()
    asked = instances(small_data, None, ("piqa", "winogrande"))["loglikelihood"]
    ours = HarnessModel(model, ByteTokenizer(), max_length=256)
    with tasks.silence_lm_eval():
        expected = plain_harness(model, ByteTokenizer()).loglikelihood(asked)
    found = ours.loglikelihood(asked)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    texts = [list(TEXT.encode()[:100])]
    whole = score(model, [Request([0, *texts[0]], 100)])[0].log_prob
    if why_not_carried(model) is None:
        carried = carried_log_likelihoods(model, texts, prefix_token=0, max_length=16)
        assert carried == pytest.approx([whole], abs=1e-3)
    else:
        with pytest.raises(ValueError, match="cannot be carried"):
            carried_log_likelihoods(model, texts, prefix_token=0, max_length=16)


def test_an_ordinary_tokenizer_scores_as_the_plain_harness_does(small_data):
    tokenizer = word_tokenizer()
    model = llama(len(tokenizer))
    asked = instances(small_data)
    ours = HarnessModel(model, tokenizer, max_length=64)
    with tasks.silence_lm_eval():
        plain = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=4, max_length=64)
        expected = plain.loglikelihood(asked["loglikelihood"])
        rolling = plain.loglikelihood_rolling(asked["loglikelihood_rolling"])
    found = ours.loglikelihood(asked["loglikelihood"])
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert ours.loglikelihood_rolling(asked["loglikelihood_rolling"]) == pytest.approx(rolling, abs=1e-4)


def test_the_plain_path_is_the_harness_itself(small_data):
    model = trained("efla")
    asked = instances(small_data)
    ours = HarnessModel(model, ByteTokenizer(), max_length=256, share=False, batch_size=4)
    with tasks.silence_lm_eval():
        expected = plain_harness(model, ByteTokenizer()).loglikelihood(asked["loglikelihood"])
        assert ours.loglikelihood(asked["loglikelihood"]) == expected


@pytest.mark.parametrize("name", ["efla", "llama"])
def test_metrics_are_those_of_the_plain_harness(name, small_data):
    """Of every task, from the harness's own class for transformers models."""
    from lm_eval.evaluator import evaluate

    model = model_of(name)
    ours = HarnessModel(model, ByteTokenizer(), max_length=256)
    for task in PAPER_TASKS:
        loaded = tasks.load_task(task, small_data)
        # Bytes get no second bos before a text in windows.
        plain = plain_harness(model, ByteTokenizer(), **({"add_bos_token": False} if task == "wikitext" else {}))
        with tasks.silence_lm_eval():
            results = evaluate(plain, {"tasks": {task: loaded}, "groups": {}}, bootstrap_iters=0, log_samples=False)
        theirs = {key.removesuffix(",none"): value for key, value in results["results"][task].items() if "," in key}
        found = run_task(ours, task, tasks.load_task(task, small_data))
        checked = [metric for metric in theirs if not metric.endswith("_stderr")]
        assert checked
        for metric in checked:
            assert found.metrics[metric] == pytest.approx(theirs[metric], rel=1e-4), (task, metric)
            assert metric_items(found.items, metric).exact_metric() == pytest.approx(theirs[metric], rel=1e-4)
        if task == "wikitext":
            windows = wikitext_items(ours, loaded, carried=False)
            assert [item["log_prob"] for item in windows] == pytest.approx([item["log_prob"] for item in found.items])
            assert [item["words"] for item in windows] == [item["words"] for item in found.items]


def test_the_uniform_model_gives_the_closed_forms_through_the_harness(small_data):
    from lm_eval.evaluator import evaluate

    model = HarnessModel(UniformLM(), ByteTokenizer(), max_length=4096)
    with tasks.silence_lm_eval():
        loaded = {t: tasks.load_task(t, small_data) for t in ("lambada_openai", "wikitext", "piqa", "sciq")}
        found = evaluate(model, {"tasks": loaded, "groups": {}}, bootstrap_iters=0, log_samples=False)["results"]
    words = [" café", " house."]
    mean_bytes = sum(len(word.encode()) for word in words) / 2
    assert found["lambada_openai"]["perplexity,none"] == pytest.approx(math.exp(mean_bytes * math.log(256)), rel=1e-5)
    assert found["lambada_openai"]["acc,none"] == 0
    pages = tasks.local_records("wikitext", small_data)
    read = tasks.definition("wikitext")["doc_to_target"]
    scored = sum(len(read(r).encode()) for r in pages)
    held = sum(len(r["page"].encode()) for r in pages)
    assert found["wikitext"]["bits_per_byte,none"] == pytest.approx(8 * scored / held, rel=1e-6)
    # The shortest choice wins under acc: "put it in the sun" (0 is right), "Turn the lid." (1 is right).
    assert found["piqa"]["acc,none"] == 0.5
    # "acids" against "oxidants", and "air" against "water".
    assert found["sciq"]["acc,none"] == 0.0


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
def test_an_interrupted_evaluation_asks_only_what_is_missing(share, small_data, tmp_path):
    asked = instances(small_data)["loglikelihood"]
    model = trained("efla")
    expected = HarnessModel(model, ByteTokenizer(), max_length=256, share=share).loglikelihood(asked)

    class Progress:
        answered = total = 0
        stop = False

        def begin(self, total: int) -> None:
            self.total = total

        def advance(self, count: int) -> None:
            self.answered += count
            if self.stop and self.answered > 20:
                raise Interrupted

    path = tmp_path / "responses.jsonl"
    first = Progress()
    first.stop = True
    options = {"max_length": 256, "share": share, "batch_tokens": 300, "batch_size": 4}
    harness = HarnessModel(model, ByteTokenizer(), progress=first, **options)
    harness.flush_at = 8
    harness.log = ResponseLog(path, {"model": "m"})
    with pytest.raises(Interrupted), tasks.silence_lm_eval():
        harness.loglikelihood(asked)
    kept = len(ResponseLog(path, {"model": "m"}))
    assert 20 < kept < len(asked)

    with open(path, "ab") as file:  # a kill in the middle of a write
        file.write(b'["0123", [-1')
    second = Progress()
    harness = HarnessModel(model, ByteTokenizer(), progress=second, **options)
    harness.log = ResponseLog(path, {"model": "m"})
    assert len(harness.log) == kept
    read: list[int] = []
    handle = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: read.append(args[0].numel()))
    try:
        with tasks.silence_lm_eval():
            found = harness.loglikelihood(asked)
            tokens_read, read[:] = sum(read), []
            again = harness.loglikelihood(asked)
    finally:
        handle.remove()
    assert tokens_read > 0 and sum(read) == 0
    assert again == found
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert second.total == len(asked)
    with pytest.raises(ValueError, match="other settings"):
        ResponseLog(path, {"model": "another"})


def test_a_model_that_cannot_fork_is_scored_the_plain_way(small_data):
    """An architecture whose cache goes wrong is noticed on the first question, not trusted."""
    model = llama()
    forward = model.forward

    def wrong(input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        out = forward(input_ids=input_ids, past_key_values=past_key_values, **kwargs)
        if past_key_values is not None and past_key_values.get_seq_length() > input_ids.shape[1]:
            out.logits = out.logits.roll(1, dims=-1)
        return out

    wrong.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = wrong
    asked = instances(small_data)["loglikelihood"]
    harness = HarnessModel(model, ByteTokenizer(), max_length=256)
    with pytest.warns(UserWarning, match="cannot continue from a shared prefill"), tasks.silence_lm_eval():
        found = harness.loglikelihood(asked)
    assert not harness.share
    with tasks.silence_lm_eval():
        expected = plain_harness(llama(), ByteTokenizer()).loglikelihood(asked)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert sharing_agrees(llama(), [])


def test_items_hold_what_is_needed_of_the_harness_samples():
    def found(task: str, **sample: Any) -> Any:
        other = {"doc_id": 3, "doc_hash": "f" * 64, **sample}
        (first, second) = item_records(task, [other, {**sample, "doc_id": 1}])
        assert first | {"doc_id": 3, "doc_hash": "f" * 16} == second
        return first

    about = {"doc_id": 1, "doc_hash": ""}
    page = {"filtered_resps": [-2.0], "word_perplexity": (-2.0, 5), "bits_per_byte": (-2.0, 30)}
    assert found("wikitext", **page) == {**about, "log_prob": -2.0, "words": 5, "bytes": 30}
    passage = {"filtered_resps": [(-3.0, True)], "arguments": [("At the", " café")]}
    assert found("lambada_openai", **passage) == {**about, "log_prob": -3.0, "acc": 1.0, "bytes": 6}
    choices = {"filtered_resps": [(-1, True), [-2, False]], "metrics": ["acc", "extra"], "acc": True, "extra": [1, 2]}
    assert found("piqa", **choices) == {**about, "log_probs": [-1.0, -2.0], "acc": 1.0}
    assert found("gsm8k", filtered_resps=["12"], metrics=["match"], match=0) == {**about, "match": 0.0}


def test_the_harness_is_told_what_the_model_is():
    model = trained("efla")
    harness = HarnessModel(model, ByteTokenizer(), max_length=256)
    parameters = sum(p.numel() for p in model.parameters())
    assert harness.get_model_info() == {"model_num_parameters": parameters, "model_dtype": "torch.float32"}
    assert (harness.max_length, harness.is_checked) == (256, True)
    assert not HarnessModel(llama(), ByteTokenizer(), max_length=256).is_checked


def test_sharing_is_tried_on_three_questions_that_have_something_to_share(monkeypatch):
    tried: list[list[Any]] = []
    true_score = score

    def recorded(model: Any, requests: Any, **options: Any) -> Any:
        tried.append([request.group for request in requests])
        return true_score(model, requests, **options)

    monkeypatch.setattr("efla.evaluation.harness.score", recorded)
    text = TEXT.encode()

    def question(group: int, shared: int, choices: int) -> list[Request]:
        return [Request([*text[:shared], 200 + i, *text[:4]], 4, group) for i in range(choices)]

    asked = [*question(0, 20, 1), *question(1, 7, 2)]
    for group in range(2, 6):
        asked += question(group, 8, 2)
    assert sharing_agrees(llama(), asked)
    assert tried == [[2, 2, 3, 3, 4, 4]] * 2


@pytest.mark.parametrize(("gap", "dtype", "agrees"), [
    (9e-4, torch.float32, True), (1.5e-3, torch.float32, False), (0.9, torch.bfloat16, True), (1.1, torch.bfloat16, False),
])  # fmt: skip
def test_sharing_may_differ_by_what_rounding_does(gap, dtype, agrees, monkeypatch):
    """A thousandth of a nat in float32, one in bfloat16."""

    def shifted(model: Any, requests: Any, share: bool = True, **options: Any) -> Any:
        return [ContinuationScore(-10.0 + gap * share, True) for _ in requests]

    monkeypatch.setattr("efla.evaluation.harness.score", shifted)
    asked = [Request([*range(1, 12), 20 + i], 1, 0) for i in range(2)]
    model = SimpleNamespace(dtype=dtype)
    message = f"^SimpleNamespace cannot .*scores differ by {gap:.2g} nats"
    with contextlib.nullcontext() if agrees else pytest.warns(UserWarning, match=message):
        assert sharing_agrees(model, asked) == agrees


def test_a_model_in_bfloat16_is_scored_with_a_softmax_in_float32(small_data):
    model = copy.deepcopy(trained("efla")).bfloat16()
    assert HarnessModel(model, ByteTokenizer(), max_length=256).softmax_dtype == torch.float32
    assert HarnessModel(trained("efla"), ByteTokenizer(), max_length=256).softmax_dtype is None


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
def test_texts_in_windows_are_kept_when_their_last_window_is_done(share, small_data, tmp_path):
    counts: list[int] = []

    class Progress:
        def begin(self, total: int) -> None:
            counts.append(-total)

        def advance(self, count: int) -> None:
            counts.append(count)

    asked = instances(small_data, None, ("wikitext",))["loglikelihood_rolling"]
    harness = HarnessModel(trained("efla"), ByteTokenizer(), max_length=30, share=share, progress=Progress())
    harness.log = ResponseLog(tmp_path / "log.jsonl", {"model": "m"})
    with tasks.silence_lm_eval():
        found = harness.loglikelihood_rolling(asked)
    assert sum(counts) == 0 and counts[0] == -len(asked) == -2
    kept = ResponseLog(tmp_path / "log.jsonl", {"model": "m"})
    assert [kept.get("loglikelihood_rolling", request.args) for request in asked] == pytest.approx(found)
