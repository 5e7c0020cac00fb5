"""Everything that makes a run, as typed data: what is trained, on what, how, on which machines, and what is watched."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from efla.data.sampling import Order
from efla.errors import unknown_name
from efla.models import presets
from efla.runs.records import Record, to_record
from efla.train.engine import Strategy
from efla.train.schedule import WarmupCosine

if TYPE_CHECKING:
    from efla.models.configuration_efla import EflaConfig

_MAY_CHANGE = {"may_change": True}
"""Metadata of what may differ when a run is continued: where and how it is run and watched, not what is computed."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained."""

    model: str = "efla-tiny"
    """A preset (efla.presets.names()), an arm of the CPU protocol with its size (exact-flow:full), or a model folder
    whose weights training starts from."""
    set: tuple[str, ...] = ()
    """Fields of the model's configuration to replace, as name=value: --set hidden_size=256 conv_init=normal."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What it is trained on."""

    data: str = "python-docs"
    """A corpus (python-docs, shakespeare, novels, enwik8), a folder of efla prepare, a file or folder of text, or
    hf:owner/name; the last three are prepared into the output folder first (of a hub's data set as many tokens as the
    run takes)."""
    data_root: str | None = field(default=None, metadata=_MAY_CHANGE)
    """Folder with the files of the corpora; default the one in EFLA_DATA."""
    tokenizer: str = "bytes"
    """For text that is not prepared yet: bytes, mistral, or a tokenizer that transformers loads."""
    length: int = 256
    """Tokens of a row."""
    rows: int = 8
    """Rows of a step over all devices: the global batch is rows * length tokens, whatever the number of devices."""
    order: Order = "uniform"
    """uniform: rows start anywhere; shuffled: the text is cut into rows, each taken once a pass."""
    documents: Literal["carry", "reset"] = "carry"
    """Whether the memory is carried over the border of documents in a row, or reset there."""
    verify_data: bool = field(default=True, metadata=_MAY_CHANGE)
    """Compare the checksums of prepared shards before training."""


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """How it is trained: AdamW, warm-up and cosine."""

    steps: int = 500
    """Optimizer steps."""
    peak_rate: float = 2e-3
    """Largest learning rate, at the end of the warm-up."""
    start_rate: float = 2e-4
    """Where the warm-up starts."""
    final_rate: float = 2e-4
    """Where the cosine ends."""
    warmup_steps: int | None = None
    """Steps from the first to the largest rate; default a tenth of the steps."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averages."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decay of matrices; one-dimensional parameters are never decayed."""
    clip: float = 1.0
    """Largest global norm of the gradient."""
    seed: int = 42
    """Seed of the weights and of the order of rows."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: linear maps under autocast; weights, norms, scan coefficients and states stay in float32."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """What to do about a loss or norm that is not finite: skip the step and count it, or stop the run."""
    max_skipped: int = 20
    """Stop after so many skipped steps in all."""


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Where it is trained; may change when a run is continued."""

    device: str = "auto"
    """auto, cpu or cuda."""
    strategy: Strategy = "auto"
    """Under torchrun: ddp (auto), fsdp (sharded weights), hsdp (sharded in groups of --shard-size, replicated over them)."""
    shard_size: int | None = None
    """For hsdp: ranks that share one copy of the weights."""
    sequence_parallel: int = 1
    """Ranks over which each row is split."""
    micro_rows: int | None = None
    """Rows of one forward pass on a device; more are accumulated. Default: all that the device has."""
    gradient_checkpointing: bool = False
    """Keep only each block's input for the backward pass and compute the rest again."""
    compile: bool = False
    """torch.compile every block."""
    threads: int | None = None
    """CPU threads; default torch's own number."""
    timeout_minutes: float = 30.0
    """How long a rank waits for another."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """What is saved and shown; may change when a run is continued."""

    save_every: int = 100
    """Steps between checkpoints (0: at the end only)."""
    keep: int = 2
    """Newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this (0: none)."""
    async_save: bool = False
    """Write checkpoints while training goes on."""
    validate_every: int = 100
    """Steps between validations (0: at the end only)."""
    validation_tokens: int = 32_768
    """Tokens of the validation text that are used (0: all)."""
    sample_every: int = 0
    """Steps between samples (0: at the end only)."""
    sample_prompt: str = "The "
    """What samples continue."""
    sample_tokens: int = 120
    """Length of a sample (0: none)."""
    tensorboard: bool = False
    """Also write TensorBoard's event files."""
    stop_after: int | None = None
    """Save and stop after so many steps in all, before the schedule's end."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run. Recipes are functions that return one; the command line replaces fields of it."""

    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    machine: MachineOptions = field(default=MachineOptions(), metadata=_MAY_CHANGE)
    watch: WatchOptions = field(default=WatchOptions(), metadata=_MAY_CHANGE)

    def __post_init__(self) -> None:
        self.schedule()
        positive = {
            "rows": self.data.rows,
            "length": self.data.length - 1,
            "clip": self.optimizer.clip,
            "keep": self.watch.keep,
        }
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} is too small: {value + (name == 'length')}")
        not_negative = (
            "save_every",
            "keep_every",
            "validate_every",
            "validation_tokens",
            "sample_every",
            "sample_tokens",
        )
        for name in not_negative:
            if getattr(self.watch, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self.watch, name)}")
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
        """The rate of every step."""
        o = self.optimizer
        warmup_steps = o.steps // 10 if o.warmup_steps is None else o.warmup_steps
        if warmup_steps > o.steps > 0:
            raise ValueError(
                f"--steps {o.steps} is less than the {warmup_steps} of the warm-up; give --warmup-steps too, or use --stop-after "
                "to do only the first steps of the whole schedule"
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
        """Rows of one forward pass, where ``data_world`` ranks hold different rows."""
        if self.data.rows % data_world:
            raise ValueError(
                f"{self.data.rows} rows a step do not divide over {data_world} ranks; choose --rows as a multiple"
            )
        share = self.data.rows // data_world
        micro = self.machine.micro_rows or share
        if micro < 1 or share % micro:
            raise ValueError(
                f"each rank has {share} rows of a step, which --micro-rows {micro} does not divide; choose a divisor"
            )
        return micro

    def model_config(self) -> EflaConfig:
        """The model's configuration, with the fields of ``--set`` replaced."""
        return resolve_model(self.model.model, parse_fields(self.model.set))

    def record(self) -> Record:
        """The whole config as JSON values."""
        return to_record(self)

    def fixed(self) -> Record:
        """The part that must be the same when a run is continued, by field."""
        found: Record = {}
        for section in dataclasses.fields(self):
            if not section.metadata.get("may_change"):
                options = getattr(self, section.name)
                for item in dataclasses.fields(options):
                    if not item.metadata.get("may_change"):
                        found[item.name] = getattr(options, item.name)
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def resolve_model(name: str, fields: dict[str, Any]) -> EflaConfig:
    """The configuration of a preset, of an arm with its profile (``exact-flow:full``), or of a model folder."""
    from pathlib import Path

    if name in presets.names():
        return presets.get(name, **fields)
    arm, _, profile = name.partition(":")
    if arm in presets.arms():
        return presets.arm(arm, profile or "quick", **fields)
    if (Path(name) / "config.json").is_file():
        from efla.models.loading import load_config

        values = load_config(name).to_dict()
        return type(load_config(name)).from_dict({**values, **fields})
    arms = [f"{arm}:{profile}" for arm in presets.arms() for profile in ("quick", "full")]
    raise unknown_name("model", name, [*presets.names(), *arms])


def parse_fields(pairs: tuple[str, ...]) -> dict[str, Any]:
    """``name=value`` pairs; a value is JSON where it can be, else text."""
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
