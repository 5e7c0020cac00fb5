"""The config of a run as typed data: the model, the data, the optimizer, the machines, and what is saved and shown."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from efla.data.sampling import Order
from efla.errors import unknown_name
from efla.models import presets
from efla.runs.records import Count, Minimum, Record, check_fields, to_record
from efla.train.optimizer import WarmupCosine

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig

NotNegative = Annotated[int, Minimum(0)]
_MAY_CHANGE = {"may_change": True}
"""Metadata of fields that may differ when a run resumes: they do not change what is computed."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model to train."""

    model: str = "efla-tiny"
    """A preset (efla.presets.names()), an arm of the CPU experiments with its size (efla:full), or a model folder
    whose weights training starts from."""
    set: tuple[str, ...] = ()
    """Fields of the model's config to replace, as name=value: --set hidden_size=256 conv_init=normal."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The text to train on."""

    data: str = "python-docs"
    """A corpus (python-docs, shakespeare, novels, enwik8), a folder of efla prepare, a file or folder of text, or
    hf:owner/name. Text is tokenized into the output folder first; of a hub's data set, as many tokens as the run needs."""
    data_root: str | None = field(default=None, metadata=_MAY_CHANGE)
    """Folder with the files of the corpora (default: EFLA_DATA)."""
    tokenizer: str = "bytes"
    """For text that is not prepared: bytes, mistral, or a tokenizer that transformers loads."""
    column: str = field(default="text", metadata=_MAY_CHANGE)
    """For text that is not prepared: key of JSON lines, or column of a table, that holds the text."""
    length: Annotated[int, Minimum(2)] = 256
    """Tokens per row."""
    rows: Count = 8
    """Rows per step over all devices: the global batch is rows * length tokens for any number of devices."""
    order: Order = "uniform"
    """uniform: rows start anywhere; shuffled: the text is cut into rows, each used once per pass."""
    documents: Literal["carry", "reset"] = "carry"
    """Whether the memory is carried over the boundary between documents in a row, or reset there."""
    verify_data: bool = field(default=True, metadata=_MAY_CHANGE)
    """Check the checksums of prepared shards before training."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW, with linear warm-up and a cosine schedule."""

    steps: int = 500
    """Optimizer steps."""
    peak_rate: float = 2e-3
    """Peak learning rate, at the end of the warm-up."""
    start_rate: float = 2e-4
    """Learning rate at the start of the warm-up."""
    final_rate: float = 2e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int | None = None
    """Steps of the warm-up (default: a tenth of the steps)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Weight decay of matrices; one-dimensional parameters have none."""
    clip: float = 1.0
    """Gradients are clipped to this global norm."""
    seed: int = 42
    """Seed of the weights and of the order of rows."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: linear maps under autocast; weights, norms, scan coefficients and states stay in float32."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """If the loss or the gradient norm is not finite: skip the step and count it, or stop the run."""
    max_skipped: int = 20
    """Stop after more than this many skipped steps."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Devices and parallelism; may change when a run resumes."""

    device: str = "auto"
    """auto, cpu or cuda."""
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = "auto"
    """Under torchrun: ddp (auto), fsdp (sharded weights), hsdp (sharded in groups of --shard-size, replicated across groups)."""
    shard_size: int | None = None
    """For hsdp: ranks that share one copy of the weights."""
    sequence_parallel: Count = 1
    """Ranks over which each row is split."""
    micro_rows: Count | None = None
    """Rows per forward pass on a device; gradients of the others are accumulated (default: all rows of the device)."""
    gradient_checkpointing: bool = False
    """Keep only each block's input for the backward pass and recompute the rest."""
    compile: bool = False
    """torch.compile every block."""
    threads: Count | None = None
    """CPU threads (default: torch's number)."""
    timeout_minutes: float = 30.0
    """How long ranks wait for each other."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is saved and shown; may change when a run resumes."""

    save_every: NotNegative = 100
    """Steps between checkpoints (0: at the end only)."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: NotNegative = 0
    """Also keep checkpoints whose step is a multiple of this (0: none)."""
    async_save: bool = False
    """Write checkpoints in the background."""
    validate_every: NotNegative = 100
    """Steps between validations (0: at the end only)."""
    validation_tokens: NotNegative = 32_768
    """Tokens of the validation text to use (0: all)."""
    sample_every: NotNegative = 0
    """Steps between samples (0: at the end only)."""
    sample_prompt: str = "The "
    """Prompt of the samples."""
    sample_tokens: NotNegative = 120
    """Tokens per sample (0: no samples)."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install wandb)."""
    stop_after: int | None = None
    """Save and stop after this many steps in total, before the end of the schedule."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The config of a run. Recipes are functions that return one; the command line replaces fields."""

    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    machine: MachineOptions = field(default=MachineOptions(), metadata=_MAY_CHANGE)
    watch: WatchOptions = field(default=WatchOptions(), metadata=_MAY_CHANGE)

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            check_fields(getattr(self, section.name))
        self.schedule()
        if self.optimizer.clip <= 0:
            raise ValueError(f"clip must be positive, got {self.optimizer.clip}")
        if self.machine.sequence_parallel > 1:
            if self.data.length % self.machine.sequence_parallel:
                raise ValueError(
                    f"rows of {self.data.length} tokens do not divide over {self.machine.sequence_parallel} ranks"
                )
            if self.data.documents == "reset":
                raise ValueError(
                    "--sequence-parallel splits rows and cannot reset the memory inside them; use --documents carry"
                )

    def schedule(self) -> WarmupCosine:
        """The learning-rate schedule."""
        o = self.optimizer
        warmup_steps = o.steps // 10 if o.warmup_steps is None else o.warmup_steps
        if warmup_steps > o.steps > 0:
            raise ValueError(
                f"--steps {o.steps} is less than the {warmup_steps} warm-up steps; set --warmup-steps too, or use --stop-after "
                "to run only the first steps of the schedule"
            )
        return WarmupCosine(
            steps=o.steps, warmup_steps=warmup_steps, peak=o.peak_rate, start=o.start_rate, final=o.final_rate
        )

    @property
    def tokens_per_step(self) -> int:
        return self.data.rows * self.data.length

    @property
    def total_tokens(self) -> int:
        return self.optimizer.steps * self.tokens_per_step

    def micro_rows(self, data_world: int) -> int:
        """Rows per forward pass if ``data_world`` ranks hold different rows."""
        if self.data.rows % data_world:
            raise ValueError(
                f"{self.data.rows} rows per step do not divide over {data_world} ranks; choose --rows as a multiple"
            )
        share = self.data.rows // data_world
        micro = self.machine.micro_rows or share
        if share % micro:
            raise ValueError(
                f"--micro-rows {micro} does not divide the {share} rows per step of a rank; choose a divisor"
            )
        return micro

    def model_config(self) -> EflaConfig:
        """The model's config, with the fields of ``--set`` replaced."""
        return resolve_model(self.model.model, parse_fields(self.model.set))

    def record(self) -> Record:
        """The whole config as JSON values."""
        return to_record(self)

    def resume_key(self) -> Record:
        """The fields that must be the same when a run resumes ("fixed" in files)."""
        sections = [getattr(self, s.name) for s in dataclasses.fields(self) if not s.metadata.get("may_change")]
        fixed = [(o, f.name) for o in sections for f in dataclasses.fields(o) if not f.metadata.get("may_change")]
        return json.loads(json.dumps({name: getattr(options, name) for options, name in fixed}))  # type: ignore[no-any-return]


def resolve_model(name: str, fields: dict[str, Any]) -> EflaConfig:
    """The config of a preset, of an arm with its profile (``efla:full``), or of a model folder."""
    if name in presets.names():
        return presets.get(name, **fields)
    arm, _, profile = name.partition(":")
    if presets.arm_of(arm) in presets.arms():
        return presets.arm(arm, profile or "quick", **fields)
    if (Path(name) / "config.json").is_file():
        from efla.models.loading import load_config

        config = load_config(name)
        return type(config).from_dict({**config.to_dict(), **fields})
    arms = [f"{arm}:{profile}" for arm in presets.arms() for profile in ("quick", "full")]
    raise unknown_name("model", name, [*presets.names(), *arms])


def parse_fields(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Parse ``name=value`` pairs; a value is JSON if possible, else text."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--set expects name=value, got {pair!r}; for example --set hidden_size=256")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields
