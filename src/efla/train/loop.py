"""A training run: start or resume, train, validate, sample, save, and export the model."""

import math
import textwrap
import time
from collections.abc import Generator
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from efla.data.prepare import PrepareConfig, map_ahead, prepare
from efla.data.readers import is_hub_name
from efla.data.sampling import RowSampler
from efla.data.source import TextData, open_data, source_kind
from efla.data.tokenizers import TextTokenizer, load_tokenizer
from efla.interruption import Interruption, Stopped
from efla.models.accounting import parameter_count
from efla.runs.progress import Bars, clock
from efla.runs.provenance import max_memory_gb
from efla.train.checkpoint import Checkpoints
from efla.train.config import TrainConfig
from efla.train.engine import Engine
from efla.train.export import export, sample
from efla.train.optimizer import build_optimizer
from efla.train.output import DATA, MetricsLog, check_resumable, open_output, read_metrics, record_config, si
from efla.train.step import StepResult, Validation, train_step, validate

MODEL, CHECKPOINTS = "model", "checkpoints"


@dataclass
class Outcome:
    """How a run ended: steps done, the last validation, skipped steps, and the exit code of the process."""

    steps: int
    validation: Validation | None
    skipped: int
    exit_code: int
    finished: bool = False


def run(config: TrainConfig, output: Path, *, console: Console | None = None) -> Outcome:
    """Train into ``output``, or resume the run there; under torchrun, together with the other ranks."""
    if config.machine.threads is not None:
        torch.set_num_threads(config.machine.threads)
    with (
        closing(Engine.start(config.machine)) as engine,
        Interruption() as asked,
        open_output(output, config) if engine.is_main else nullcontext(),
    ):
        engine.barrier()
        shown = console if engine.is_main else None
        try:
            process = Run(config, output, engine, shown, asked)
        except Stopped:
            Bars(shown).line(_farewell(asked.name, 0))
            return Outcome(0, None, 0, asked.exit_code)
        with closing(process):
            return process.train()


class Run:
    """One process's part of a run; resumes from the newest checkpoint if there is one."""

    def __init__(
        self,
        config: TrainConfig,
        output: Path,
        engine: Engine,
        console: Console | None,
        asked: Interruption | None = None,
    ) -> None:
        self.config, self.output, self.engine, self.console = config, output, engine, console
        self.asked = asked or Interruption()
        self.micro_rows = config.micro_rows(engine.data_world)
        self.data = self._open_data()
        self.tokenizer: TextTokenizer = load_tokenizer(self.data.tokenizer)
        self.unit = "byte" if self.tokenizer.name == "bytes" else "token"
        bos_token = self.data.bos_token if config.data.documents == "reset" else None
        self.scoring: dict[str, Any] = {
            "bos_token": bos_token, "precision": config.optimizer.precision, "engine": engine
        }  # fmt: skip
        self.sampler = RowSampler(
            self.data.train, config.data.length, config.data.rows, config.optimizer.seed, config.data.order
        )
        self.model = engine.wrap(self._build_model(), compile_blocks=config.machine.compile)
        o = config.optimizer
        self.optimizer = build_optimizer(self.model, weight_decay=o.weight_decay, betas=o.betas, eps=o.eps)
        self.checkpoints = Checkpoints(
            output / CHECKPOINTS, engine, keep=config.watch.keep, keep_every=config.watch.keep_every
        )
        self.step = 0
        self.skipped = 0
        self.saved_at = 0  # the seed gives the weights of step 0
        self.validation: Validation | None = None
        self._resume()
        self.metrics: MetricsLog | None = None
        if engine.is_main:
            record_config(output, config)
            watch = config.watch
            self.metrics = MetricsLog(output, self.step, tensorboard=watch.tensorboard, wandb=watch.wandb)

    def train(self) -> Outcome:
        """Run the remaining steps; stops early after a signal."""
        schedule, steps = self.config.schedule(), self.config.optimizer.steps
        self._log("start", world=self.engine.world, strategy=self.engine.strategy, data=self.data.digest)
        with Bars(self.console) as self.bars, closing(self._batches()) as batches:
            for line in self._greeting():
                self.bars.line(line)
            self.first_step, self.started = self.step, time.monotonic()
            stopped = self._is_enough() or self._is_asked()
            while self.step < steps and not stopped:
                start = time.perf_counter()
                batch = next(batches)
                rate = schedule.rate(self.step)
                result = train_step(
                    self.model,
                    self.optimizer,
                    batch.split(self.micro_rows),
                    rate=rate,
                    clip=self.config.optimizer.clip,
                    stop=lambda: self.asked.signal is not None,
                    **self.scoring,
                )
                self.step += 1
                self._after_step(result, rate, time.perf_counter() - start)
                stopped = result.stop or self._is_enough()
                self._at_intervals(last=self.step == steps)
            self.checkpoints.wait()
            if stopped and self.step < steps:
                self._save(wait=True)
                name, code = ("--stop-after", 0) if self._is_enough() else (self.asked.name, self.asked.exit_code)
                self._log("end", why=name)
                self.bars.line(_farewell(name, self.step))
                return Outcome(self.step, self.validation, self.skipped, code)
            export(self.model, self.tokenizer, self.output / MODEL, self.engine)
            self._log("end", why="finished")
            for line in self._summary():
                self.bars.line(line)
        return Outcome(self.step, self.validation, self.skipped, 0, finished=True)

    def _batches(self) -> Generator[Tensor, None, None]:
        """This rank's rows of the remaining steps, read one step ahead."""
        rank, world = self.engine.data_rank, self.engine.data_world
        steps = range(self.step, self.config.optimizer.steps)
        with ThreadPoolExecutor(1) as pool:
            yield from map_ahead(pool, lambda step: self.sampler.batch(step, rank, world), steps, ahead=1)

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()

    def _after_step(self, result: StepResult, rate: float, seconds: float) -> None:
        tokens_per_second = self.config.tokens_per_step / seconds
        self._log(
            "step",
            loss=result.loss,
            norm=result.norm,
            rate=rate,
            tokens=self.step * self.config.tokens_per_step,
            applied=result.applied,
            seconds=round(seconds, 6),
            tokens_per_second=round(tokens_per_second, 1),
        )
        self._show_step(result.loss, rate, tokens_per_second)
        if result.applied:
            return
        self.skipped += 1
        rows = self.sampler.numbers(self.step - 1)
        what = (
            f"step {self.step}: loss {result.loss}, gradient norm {result.norm} is not finite "
            f"(rows {rows[0]} to {rows[-1]}, rate {rate:.3g})"
        )
        policy = self.config.optimizer
        if policy.nonfinite == "stop" or self.skipped > policy.max_skipped:
            last = self.checkpoints.saved()
            where = f"the last good checkpoint is {last[-1]}" if last else "no checkpoint has been saved"
            too_many = f", {self.skipped} such steps (--max-skipped {policy.max_skipped})"
            reason = "" if policy.nonfinite == "stop" else too_many
            self._log("end", why="not finite")
            raise RuntimeError(
                f"{what}{reason}; stopped before the weights changed, {where}. Lower --peak-rate, or check the data"
            )
        self.bars.line(f"{what}; the step was skipped ({self.skipped} so far)")

    def _show_step(self, loss: float, rate: float, tokens_per_second: float) -> None:
        steps = self.config.optimizer.steps
        left = (time.monotonic() - self.started) / (self.step - self.first_step) * (steps - self.step)
        speed = si(tokens_per_second, "tokens/s")
        self.bars.update("", self.step, steps, f"{self.step:,}/{steps:,}  loss {loss:.3f}  {speed}  {clock(left)} left")
        self.bars.line_now_and_then(
            f"step {self.step:,}/{steps:,}  loss {loss:.3f}  rate {rate:.1e}  {speed}  {clock(left)} left"
        )

    def _at_intervals(self, *, last: bool) -> None:
        watch = self.config.watch
        if last or _due(self.step, watch.validate_every):
            self._validate()
        if watch.sample_tokens and (last or _due(self.step, watch.sample_every)):
            self._sample()
        if last or _due(self.step, watch.save_every):
            self._save(wait=last or not watch.async_save)

    def _validate(self) -> None:
        if len(self.data.validation) < 2:
            return
        found = validate(
            self.model,
            self.data.validation,
            length=self.config.data.length,
            rows=self.micro_rows,
            limit=self.config.watch.validation_tokens or None,
            **self.scoring,
        )
        self.validation, bits = found, found.bits_per_token
        self._log("validation", loss=found.loss, bits_per_token=bits, perplexity=found.perplexity, tokens=found.tokens)
        self.bars.line(f"step {self.step:,}: validation loss {found.loss:.4f}, {bits:.4f} bits per {self.unit}")

    def _sample(self) -> None:
        watch, options = self.config.watch, {name: self.scoring[name] for name in ("engine", "precision")}
        text = sample(self.model, self.tokenizer, watch.sample_prompt, watch.sample_tokens, **options)
        if text is not None:
            self._log("sample", prompt=watch.sample_prompt, text=text)
            self.bars.line(textwrap.fill(f"step {self.step:,}: {watch.sample_prompt}{text}", 80))

    def _save(self, *, wait: bool) -> None:
        if self.saved_at == self.step:
            return
        state = {"skipped": self.skipped, "fixed": self.config.resume_key(), "data": self.data.digest}
        self.checkpoints.save(self.step, self.model, self.optimizer, state, wait=wait)
        self.saved_at = self.step

    def _resume(self) -> None:
        if (newest := self.checkpoints.latest()) is None:
            return
        state = self.checkpoints.load(newest, self.model, self.optimizer)
        check_resumable(state["fixed"], self.config, newest)
        if state["data"] != self.data.digest:
            raise ValueError(
                f"the text of --data {self.config.data.data} has changed since {newest} was saved "
                f"(digest {state['data']} there, {self.data.digest} now); restore it or choose another --output"
            )
        self.step, self.skipped, self.saved_at = state["step"], state["skipped"], state["step"]

    def _open_data(self) -> TextData:
        """The tokens of ``--data``; text is first tokenized into the output folder. A signal stops that; it resumes."""
        options, folder = self.config.data, None
        if source_kind(options.data) == "text":
            folder = self.output / DATA
            if self.engine.is_main:
                Bars(self.console).line(f"preparing {options.data} into {folder}")
                limit = self.config.total_tokens if is_hub_name(options.data) else 0
                text = PrepareConfig(
                    sources=(options.data,), tokenizer=options.tokenizer, column=options.column, max_tokens=limit
                )
                try:
                    prepare(text, folder, watch=self._stop_on_signal)
                except (Stopped, BrokenExecutor):  # the signal may have ended the workers as well
                    if self.asked.signal is None:
                        raise
            if self._is_asked():
                raise Stopped
        verify = options.verify_data and self.engine.is_main
        data = open_data(options.data, root=options.data_root, folder=folder, verify=verify)
        self.engine.barrier()
        return data

    def _stop_on_signal(self, **progress: int) -> None:
        if self.asked.signal is not None:
            raise Stopped

    def _build_model(self) -> nn.Module:
        """A model with the same weights on every rank: from the seed, or from a model folder."""
        from efla.models.modeling_efla import EflaForCausalLM

        model_config = self.config.model_config()
        if self.data.vocab_size > model_config.vocab_size:
            raise ValueError(
                f"{self.data.name} has a vocabulary of {self.data.vocab_size} ({self.data.tokenizer}), the model "
                f"{self.config.model.model} only {model_config.vocab_size}; use --set vocab_size={self.data.vocab_size}"
            )
        torch.manual_seed(self.config.optimizer.seed)
        if (Path(self.config.model.model) / "config.json").is_file():
            model: Any = EflaForCausalLM.from_pretrained(
                self.config.model.model, config=model_config, dtype=torch.float32
            )
        else:
            model = EflaForCausalLM(model_config)
        if self.config.machine.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    def _greeting(self) -> list[str]:
        parameters = parameter_count(self.model)
        where = f"{self.engine.world} x {self.engine.device.type}, {self.engine.strategy}"
        begin = "from the start" if self.step == 0 else f"from step {self.step:,}"
        return [
            f"{self.config.model.model}: {parameters:,} parameters on {self.data.name} ({len(self.data.train):,} tokens)",
            f"{self.config.optimizer.steps:,} steps of {self.config.tokens_per_step:,} tokens, {where}, {begin}",
        ]

    def _summary(self) -> list[str]:
        """A table of at most eight validations, and the cost of the run."""
        rows = read_metrics(self.output) if self.engine.is_main else []
        steps = {row["step"]: row for row in rows if row["event"] == "step"}
        found = [row for row in rows if row["event"] == "validation"]
        every = max(1, math.ceil(len(found) / 8))
        headings = ("step", "training loss", "validation loss", f"bits per {self.unit}")
        lines = ["".join(f"{heading:>17}" for heading in headings)] if found else []
        for row in found[(len(found) - 1) % every :: every]:
            values = (steps[row["step"]]["loss"], row["loss"], row["bits_per_token"])
            lines.append(f"{row['step']:>17,}" + "".join(f"{float(value):>17.4f}" for value in values))
        seconds, tokens = sum(row["seconds"] for row in steps.values()), self.step * self.config.tokens_per_step
        speed, memory = si(tokens / max(seconds, 1e-9), "tokens/s"), max_memory_gb(self.engine.device)
        skipped = f", {self.skipped} steps skipped" if self.skipped else ""
        return [*lines, f"{si(tokens, 'tokens')} in {clock(seconds)}, {speed}, {memory:.2f} GB{skipped}"]

    def _is_enough(self) -> bool:
        limit = self.config.watch.stop_after
        return limit is not None and self.step >= limit

    def _is_asked(self) -> bool:
        """Whether any rank has received a signal."""
        return self.engine.all_reduce_sum([float(self.asked.signal is not None)])[0] > 0

    def _log(self, event: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(event, self.step, **values)


def _farewell(name: str, step: int) -> str:
    where = f"at step {step:,}, saved" if step else "before the first step"
    return f"stopped by {name} {where}; the same command resumes"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
