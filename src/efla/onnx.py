"""Exported models without torch: ``Runner("model.onnx").generate("Once upon a time")``. Needs numpy and onnxruntime only.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import json
import os
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from efla.errors import import_optional

FORMAT = 1
"""Version of the names and metadata in the file."""
OLDEST_RUNTIME = (1, 25, 1)
"""The first onnxruntime with the operators ``LinearAttention`` and ``CausalConvWithState`` at opset 24."""
_PREFILL = 512
_BOUNDARY = 0  # the token of the byte tokenizer that starts and ends a text


@dataclass
class State:
    """What the model remembers: arrays by the names of the graph's inputs, and the number of tokens they have seen.

    model: which exported model made it, the ``efla.model`` of its metadata; empty if that is not known.
    """

    arrays: dict[str, NDArray[np.float32]]
    num_tokens: int = 0
    model: str = ""

    def save(self, path: str | Path) -> None:
        """Write an .npz file, which :meth:`Runner.load_state` reads; an old one is replaced when the new one is complete."""
        path = Path(os.path.realpath(path))  # a link stays a link
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        entries: dict[str, Any] = {"num_tokens": np.int64(self.num_tokens), "model": np.str_(self.model), **self.arrays}
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **entries)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


class Runner:
    """A model written by ``efla export onnx``.

    runner(ids, state) -> logits [B, T, vocabulary] and the new state (with ``--last-logits``, [B, 1, vocabulary]).
    ``config`` is the model's configuration, ``metadata`` everything else that the file says about itself.
    num_threads: default one for each core. providers: onnxruntime's execution providers. settings: entries of its session
    configuration, such as {"session.force_spinning_stop": "1"}.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        runtime = _import_runtime()
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; write it with `efla export onnx MODEL {path.name}`")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = num_threads or 0
        options.log_severity_level = 3
        for name, value in (settings or {}).items():
            options.add_session_config_entry(name, value)
        try:
            self.session = runtime.InferenceSession(str(path), options, providers=list(providers))
        except Exception as error:  # onnxruntime's errors have no common class
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"{path} ({path.stat().st_size:,} bytes) could not be loaded: {reason}. A file that is not complete, or whose "
                "weights (.onnx.data) are not beside it, must be copied or exported again"
            ) from error
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)
        if self.metadata.get("efla.format") != str(FORMAT):
            raise ValueError(
                f"{path} has format {self.metadata.get('efla.format')!r} and not {FORMAT}; "
                "expected a file written by `efla export onnx` of this version"
            )
        self.config: dict[str, Any] = json.loads(self.metadata["efla.config"])
        self.states: list[dict[str, Any]] = json.loads(self.metadata["efla.states"])
        self._model = self.metadata.get("efla.model", "")  # not in files of older versions
        self._outputs = ["logits", *(state["output"] for state in self.states)]
        tokenizer = self.metadata["efla.tokenizer"]
        self._tokenizer = None if tokenizer == "none" else _Tokenizer(tokenizer)

    def new_state(self, batch_size: int = 1) -> State:
        """The state before the first token."""
        sizes = {"batch": batch_size, "past": 0}
        return State(
            {s["input"]: np.zeros([sizes.get(size, size) for size in s["shape"]], np.float32) for s in self.states},
            model=self._model,
        )

    def load_state(self, path: str | Path) -> State:
        """A state written by :meth:`State.save`, refused if another model made it.

        Files of older versions do not say which model they belong to; then only names and shapes are compared.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:  # another kind of file, or not all of it
            raise ValueError(
                f"{path} is not a state of an exported model ({error}); write it with State.save"
            ) from error
        if "num_tokens" not in arrays or arrays["num_tokens"].shape:
            raise ValueError(f"{path} is not a state: it has no number 'num_tokens'; write it with State.save")
        state = State(arrays, int(arrays.pop("num_tokens")), str(arrays.pop("model", "")))
        first = arrays.get(self.states[0]["input"])
        self._check_state(state, 1 if first is None or not first.shape else len(first))
        return state

    def __call__(self, ids: ArrayLike, state: State | None = None) -> tuple[NDArray[np.float32], State]:
        """Logits after each of the tokens ids [B, T], which follow those that ``state`` has seen, and the new state."""
        tokens = self._check_ids(ids)
        if state is None:
            state = self.new_state(len(tokens))
        self._check_state(state, len(tokens))
        logits, *arrays = self.session.run(self._outputs, {"input_ids": tokens, **state.arrays})
        names = [state["input"] for state in self.states]
        return logits, State(dict(zip(names, arrays, strict=True)), state.num_tokens + tokens.shape[1], self._model)

    def generate(self, prompt: str, **options: Any) -> str:
        """The text that follows the prompt; options as in :meth:`stream`."""
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str, *, state: State | None = None, **options: Any) -> Iterator[str]:
        """Pieces of the text that follows the prompt, one for each token; a piece ends with a whole character.

        Options as in :meth:`stream_ids`. A prompt that continues a state is not preceded by the token that starts a text.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ValueError("the model was exported without a tokenizer; pass token ids to stream_ids")
        ids = tokenizer.encode(prompt, starts=state is None or state.num_tokens == 0)
        if not ids:
            raise ValueError("the prompt has no tokens; give some text")
        new: list[int] = []
        num_written = 0
        for step in self.stream_ids([ids], state=state, **options):
            new.append(int(step[0]))
            text = tokenizer.decode(new)
            whole = text.rstrip("\N{REPLACEMENT CHARACTER}")  # the rest of the character is still to come
            yield whole[num_written:]
            num_written = max(num_written, len(whole))
        yield text[num_written:] if new else ""

    def stream_ids(
        self,
        ids: ArrayLike,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        state: State | None = None,
    ) -> Iterator[NDArray[np.int64]]:
        """New tokens [B] after the prompts ids [B, T], all of one length, until every sequence has ended.

        temperature: 0 takes the most likely token. top_k, top_p: sample only among the k most likely tokens, or among the most
        likely tokens of that total probability. A sequence that has ended repeats its padding token.
        state: continue from it; afterwards it includes the prompt and every new token.
        """
        if max_new_tokens < 1 or temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise ValueError(
                "max_new_tokens must be at least 1, temperature and top_k at least 0, and top_p above 0 and at most 1; "
                f"got {max_new_tokens}, {temperature:g}, {top_k} and {top_p:g}"
            )
        tokens = self._check_ids(ids)
        current = self.new_state(len(tokens)) if state is None else state
        ends = self.config.get("eos_token_id")
        ends = [] if ends is None else np.atleast_1d(ends)
        padding = self.config.get("pad_token_id")
        random = np.random.default_rng(seed)
        has_ended = np.zeros(len(tokens), bool)
        for start in range(0, tokens.shape[1], _PREFILL):
            logits, current = self(tokens[:, start : start + _PREFILL], current)
        for number in range(max_new_tokens):
            step = sample(logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p, random=random)
            if len(ends):
                step = np.where(has_ended, ends[0] if padding is None else padding, step)
                has_ended |= np.isin(step, ends)
            yield step
            is_last = has_ended.all() or number + 1 == max_new_tokens
            if not is_last or state is not None:
                logits, current = self(step[:, None], current)
            if is_last:
                break
        if state is not None:
            state.arrays, state.num_tokens, state.model = current.arrays, current.num_tokens, current.model

    def _check_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        try:
            tokens = np.asarray(ids)
        except ValueError as error:
            raise ValueError("token ids must be [B, T]: pass prompts of different lengths one at a time") from error
        if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers [B, T] with T >= 1, got {tokens.dtype} {list(tokens.shape)}")
        if tokens.min() < 0 or tokens.max() >= self.config["vocab_size"]:
            raise ValueError(
                f"token ids must be in [0, {self.config['vocab_size']}), got {tokens.min()} to {tokens.max()}; "
                "use the model's tokenizer"
            )
        return tokens.astype(np.int64)

    def _check_state(self, state: State, batch_size: int) -> None:
        expected = {s["input"]: [batch_size if size == "batch" else size for size in s["shape"]] for s in self.states}
        if state.arrays.keys() != expected.keys():
            raise ValueError(
                f"the state must have the arrays {', '.join(expected)}, got {', '.join(state.arrays)}; "
                "it belongs to another model. Start with Runner.new_state"
            )
        for name, shape in expected.items():
            given = list(state.arrays[name].shape)
            if len(given) != len(shape) or any(a != b for a, b in zip(given, shape, strict=True) if b != "past"):
                raise ValueError(
                    f"{name} of the state must have shape {shape}, got {given}; "
                    "a state belongs to one model and one batch size. Start with Runner.new_state"
                )
        if state.model and self._model and state.model != self._model:
            raise ValueError(
                "the state belongs to another model of the same shapes: another checkpoint, rule or quantisation; "
                "continue it with the file that made it, or start with Runner.new_state"
            )


def sample(
    logits: NDArray[np.float32], *, temperature: float, top_k: int, top_p: float, random: np.random.Generator
) -> NDArray[np.int64]:
    """One token for each row of logits [B, vocabulary]; arguments as in :meth:`Runner.stream_ids`."""
    if temperature == 0:
        return logits.argmax(-1)
    scores = logits.astype(np.float64) / temperature
    order = np.argsort(-scores, axis=-1, kind="stable")
    scores = np.take_along_axis(scores, order, -1)
    weights = np.exp(scores - scores[:, :1])
    if top_k:
        weights[:, top_k:] = 0
    weights /= weights.sum(-1, keepdims=True)
    before = np.cumsum(weights, axis=-1) - weights
    weights[:, 1:][before[:, 1:] >= top_p] = 0
    total = np.cumsum(weights, axis=-1)
    drawn = random.random((len(logits), 1)) * total[:, -1:]
    return np.take_along_axis(order, (total <= drawn).sum(-1, keepdims=True), -1)[:, 0]


class _Tokenizer:
    """Bytes, without any package, or a tokenizer.json, by the package tokenizers."""

    def __init__(self, description: str) -> None:
        self._fast: Any = None
        if description != "bytes":
            missing = "the model's tokenizer needs the package tokenizers: pip install tokenizers"
            self._fast = import_optional("tokenizers", missing).Tokenizer.from_str(description)

    def encode(self, text: str, starts: bool) -> list[int]:
        if self._fast is None:
            return [*([_BOUNDARY] if starts else []), *text.encode()]
        return list(self._fast.encode(text, add_special_tokens=starts).ids)

    def decode(self, ids: list[int]) -> str:
        if self._fast is None:
            return bytes(i for i in ids if i != _BOUNDARY).decode(errors="replace")
        return str(self._fast.decode(ids, skip_special_tokens=False))


def _import_runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeError(f"exported models run on onnxruntime ({error}): pip install 'efla[onnx]'") from error
    given = tuple(int(part) for part in onnxruntime.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if given < OLDEST_RUNTIME:
        oldest = ".".join(map(str, OLDEST_RUNTIME))
        raise RuntimeError(
            f"onnxruntime {onnxruntime.__version__} lacks the operators LinearAttention and CausalConvWithState; "
            f"expected {oldest} or newer: pip install 'onnxruntime>={oldest}'"
        )
    return onnxruntime
