"""lm-evaluation-harness's own task definitions, with the data read from local files where a folder is given.

Prompts, choices and metrics are the harness's; only the source of the records changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efla.errors import unknown_name
from efla.evaluation import local_data
from efla.evaluation.columns import PAPER_TASKS

_FILES = {
    "wikitext": "wikitext/wikitext.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "sciq": "sciq/sciq.yaml",
}


def require_lm_eval() -> None:
    """Say what to install where the harness is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise RuntimeError("evaluation needs lm-evaluation-harness: pip install 'efla[eval]'") from None


def expand(names: Sequence[str]) -> list[str]:
    """Task names as given, "paper" standing for the paper's ten."""
    found = [task for name in names for task in (PAPER_TASKS if name == "paper" else (name,))]
    if not found:
        raise ValueError("give at least one task, such as --tasks paper or --tasks piqa lambada_openai")
    return list(dict.fromkeys(found))


def load_task(name: str, data: Path | None, limit: int | None = None) -> Any:
    """One task of the harness, zero-shot: from local files if ``data`` is given and the task is one of the paper's, else
    from the Hugging Face hub or its cache on this machine."""
    require_lm_eval()
    with quiet():
        if name in _FILES:
            config = definition(name)
            if data is not None:
                config |= _local_source(name, data, limit)
            task = _build(name, config)
        else:
            task = _load_other(name)
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return task


def definition(name: str) -> dict[str, Any]:
    """The harness's definition of one of the paper's tasks."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml

    return dict(load_yaml(Path(lm_eval.tasks.__file__).parent / _FILES[name], resolve_func=True))


def _local_source(name: str, data: Path, limit: int | None) -> dict[str, Any]:
    """What is changed in a definition: where the records come from. Only the split that is scored is there."""
    split = local_data.SOURCES[name].split

    def load(**_: Any) -> dict[str, Any]:
        import datasets

        return {split: datasets.Dataset.from_list(local_data.records(name, data, limit))}

    changes: dict[str, Any] = {"custom_dataset": load, "training_split": None}
    if split == "test":
        changes["validation_split"] = None
    return changes


def _build(name: str, config: dict[str, Any]) -> Any:
    from lm_eval.api.task import ConfigurableTask

    if "custom_dataset" in config:
        return ConfigurableTask(config=config)
    try:
        return ConfigurableTask(config=config)
    except Exception as error:  # datasets, huggingface_hub and their HTTP libraries each raise their own
        files = " and ".join(local_data.SOURCES[name].files)
        raise RuntimeError(
            f"task {name!r} could not be loaded from the Hugging Face hub ({config['dataset_path']}): "
            f"{type(error).__name__}: {_first_line(error)}. Without a network give a folder that holds {files} with --data "
            "DIR or EFLA_DATA"
        ) from error


def _load_other(name: str) -> Any:
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    if name not in manager.all_tasks:
        raise unknown_name("task", name, ["paper", *PAPER_TASKS]) from None
    try:
        tasks = manager.load([name])["tasks"]
    except Exception as error:
        raise RuntimeError(
            f"task {name!r} could not be loaded from the Hugging Face hub: {type(error).__name__}: {_first_line(error)}; it "
            f"has no local files (those that do: {', '.join(PAPER_TASKS)})"
        ) from error
    if len(tasks) != 1:
        raise ValueError(f"{name!r} is a group of {len(tasks)} tasks; name them one by one: {', '.join(tasks)}")
    return next(iter(tasks.values()))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the harness's remarks and bars off the terminal; errors still come through."""
    import datasets
    import lm_eval.api.task
    import lm_eval.models.huggingface

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval")]
    levels = [logger.level for logger in loggers]
    modules: list[Any] = [lm_eval.api.task, lm_eval.models.huggingface, lm_eval.api.model]
    bars = [module.tqdm for module in modules]
    had_bars = not datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    for module in modules:
        module.tqdm = _no_bar
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for module, bar in zip(modules, bars, strict=True):
            module.tqdm = bar
        if had_bars:
            datasets.enable_progress_bars()


def _no_bar(*args: Any, **kwargs: Any) -> Any:
    from tqdm import tqdm

    return tqdm(*args, **{**kwargs, "disable": True})
