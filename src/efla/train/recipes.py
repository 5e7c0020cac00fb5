"""Named configs: the paper's, those of the CPU experiments, and tiny ones that run anywhere.

tiny, MODEL-tiny       bytes of Python's documentation, about a minute on a laptop
MODEL-340m-paper       512 rows of 2,048 tokens, 7,629 steps: 8.0 billion tokens of SlimPajama
MODEL-1.3b-paper       1,024 rows of 2,048 tokens, 23,842 steps: 50.0 billion tokens
ARM-quick, ARM-full    the CPU experiments of `efla reproduce lm`
"""

from collections.abc import Callable
from functools import partial

from efla.errors import unknown_name
from efla.models import presets
from efla.train.config import DataOptions, MachineOptions, ModelOptions, OptimizerOptions, TrainConfig, WatchOptions

_MODELS = [name.removesuffix("-tiny") for name in presets.names() if name.endswith("-tiny")]
# Rows of 2,048 tokens per step, steps, and rows per forward pass on an 80 GB device.
_PAPER = {"340m": (512, 7_629, 16), "1.3b": (1_024, 23_842, 8)}
_SLIMPAJAMA = "hf:cerebras/SlimPajama-627B"


def tiny(preset: str) -> TrainConfig:
    """A minute on a laptop, without a download: 471,000 parameters on the bytes of Python's documentation."""
    return TrainConfig(model=ModelOptions(model=preset))


def paper(model: str, size: str) -> TrainConfig:
    """The paper's recipe: SlimPajama with the Mistral tokenizer.

    Convolutions are initialized as in the paper's code (conv_init=normal).
    """
    rows, steps, micro_rows = _PAPER[size]
    return TrainConfig(
        model=ModelOptions(model=f"{model}-{size}", set=("conv_init=normal",)),
        data=DataOptions(data=_SLIMPAJAMA, tokenizer="mistral", length=2_048, rows=rows, order="shuffled"),
        optimizer=OptimizerOptions(
            steps=steps,
            peak_rate=3e-4,
            start_rate=3e-5,
            final_rate=3e-5,
            warmup_steps=1_024,
            eps=1e-15,
            precision="bfloat16",
        ),
        machine=MachineOptions(micro_rows=micro_rows),
        watch=WatchOptions(
            save_every=500,
            keep=3,
            async_save=True,
            validate_every=500,
            validation_tokens=4_194_304,
            sample_every=500,
            tensorboard=True,
        ),
    )


def cpu_protocol(arm: str, profile: str) -> TrainConfig:
    """One arm of the CPU experiments, "quick" on Shakespeare or "full" on the novels."""
    steps, length, validate_every, validation_tokens, corpus = {
        "quick": (200, 256, 50, 32_768, "shakespeare"),
        "full": (2_000, 512, 250, 131_072, "novels"),
    }[profile]
    return TrainConfig(
        model=ModelOptions(model=f"{arm}:{profile}"),
        data=DataOptions(data=corpus, length=length, rows=8),
        optimizer=OptimizerOptions(steps=steps),
        watch=WatchOptions(
            save_every=validate_every, validate_every=validate_every, validation_tokens=validation_tokens
        ),
    )


_RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "tiny": partial(tiny, "efla-tiny"),
    **{f"{model}-tiny": partial(tiny, f"{model}-tiny") for model in _MODELS},
    **{
        f"{presets.arm_name(arm)}-{p}": partial(cpu_protocol, arm, p)
        for p in ("quick", "full")
        for arm in presets.arms()
    },
    **{f"{model}-{size}-paper": partial(paper, model, size) for size in _PAPER for model in _MODELS},
}


def names() -> list[str]:
    """Names of all recipes."""
    return list(_RECIPES)


def get(name: str) -> TrainConfig:
    """The config of that name; an arm may have its key in rows, such as exact-flow for efla."""
    arm, _, size = name.rpartition("-")
    found = _RECIPES.get(name)
    if found is None and arm in presets.arms():
        found = _RECIPES.get(f"{presets.arm_name(arm)}-{size}")
    if found is None:
        raise unknown_name("recipe", name, _RECIPES)
    return found()
