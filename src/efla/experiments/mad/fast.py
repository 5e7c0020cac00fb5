"""Recall instances drawn in one vectorised call, from the same distribution as :mod:`efla.experiments.mad.exact`.

Shapes: n instances, L tokens, P pairs. The order of draws differs from the reference generator's, and so do the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from efla.experiments.mad.exact import IGNORE, shifted

if TYPE_CHECKING:
    from efla.experiments.mad.tasks import Setting

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def in_context_recall(setting: Setting, rng: Generator, count: int, *, training: bool) -> tuple[Ints, Ints]:
    """Plain and noisy multi-query recall: inputs and targets, each [n, L - 1]."""
    pairs = setting.seq_len // 2
    key, noise = _slots(setting, count, rng)  # [n, P - 1]
    value_of = rng.integers(setting.values.start, setting.values.stop, size=(count, len(setting.keys)))
    rows = np.arange(count)
    seen = np.zeros((count, len(setting.keys)), dtype=bool)
    shown = np.zeros((count, pairs), dtype=bool)  # was the slot's key shown earlier in this instance?
    for slot in range(pairs - 1):
        shown[:, slot] = seen[rows, key[:, slot]]
        seen[rows, key[:, slot]] |= ~noise[:, slot]
    # The probe is the r-th of the keys shown, counted from the smallest: uniform among them like any other order.
    rank = rng.integers(0, seen.sum(1))
    probe = (seen.cumsum(1) == rank[:, None] + 1).argmax(1)
    shown[:, -1] = True
    key = np.concatenate([key, probe[:, None]], axis=1)
    noise = np.concatenate([noise, np.zeros((count, 1), dtype=bool)], axis=1)
    raw = np.stack([key, value_of[rows[:, None], key]], axis=2)  # [n, P, 2]
    if noise.any():
        raw[noise] = rng.integers(setting.pair_vocab_size, setting.vocab_size, size=(int(noise.sum()), 2))
    answers = np.full((count, pairs, 2), IGNORE, dtype=np.int64)
    answers[:, :, 1] = np.where(shown & ~noise, raw[:, :, 1], IGNORE)
    return shifted(raw.reshape(count, -1), answers.reshape(count, -1), training)


def _slots(setting: Setting, count: int, rng: Generator) -> tuple[Ints, Bools]:
    """Key and noise flag of the first P - 1 slots of each instance; one without any pair is drawn again."""
    pairs = setting.seq_len // 2
    key = rng.integers(0, len(setting.keys), size=(count, pairs - 1))
    noise = np.zeros((count, pairs - 1), dtype=bool)
    if setting.frac_noise > 0:
        empty = np.arange(count)
        while len(empty):
            protected = rng.integers(0, pairs, size=(len(empty), 1))
            below = rng.random((len(empty), pairs - 1)) < setting.frac_noise
            noise[empty] = below & (np.arange(pairs - 1) != protected)
            empty = empty[noise[empty].all(1)]
    return key, noise


def fuzzy_in_context_recall(
    setting: Setting, rng: Generator, count: int, *, training: bool, guarantee_probe: bool = False
) -> tuple[Ints, Ints]:
    """Fuzzy multi-query recall: inputs and targets, each [n, L]. All instances add one pair of motifs per round."""
    kmax, vmax, length = setting.k_motif_size, setting.v_motif_size, setting.seq_len
    widest = kmax + vmax
    rows = np.arange(count)

    def sizes() -> tuple[Ints, Ints]:
        key_size = rng.integers(1, kmax + 1, size=count) if training else np.full(count, kmax)
        return key_size, rng.integers(1, vmax + 1, size=count)

    key_size, value_size = sizes()
    probe_key = _motifs(setting.keys, kmax, key_size, rng)
    probe_value = _motifs(setting.values, vmax, value_size, rng)
    probe_sizes = (key_size, value_size)
    probe_size = key_size + value_size
    where = rng.integers(0, length - 2 * probe_size)
    limit = length - probe_size - widest
    placed = np.zeros(count, dtype=bool)
    filled = np.zeros(count, dtype=np.int64)
    raw = np.full((count, length + 1 + widest), setting.marker, dtype=np.int64)
    answers = np.full_like(raw, IGNORE)
    # What each instance has shown: a key's code and its value, one column per round.
    base = setting.vocab_size + 1
    codes = np.full((count, 1 + length // 2), -1, dtype=np.int64)
    values = np.full((count, 1 + length // 2, vmax), -1, dtype=np.int64)
    probe_code = _code(probe_key, base)
    for step in range(length):
        active = filled < limit
        if not active.any():
            break
        key_size, value_size = sizes()
        key = _motifs(setting.keys, kmax, key_size, rng)
        code = _code(key, base)
        same = codes[:, :step] == code[:, None]
        known = same.any(1)
        value = _motifs(setting.values, vmax, value_size, rng)
        if step:
            value = np.where(known[:, None], values[rows, same.argmax(1)], value)
        value = np.where((code == probe_code)[:, None], probe_value, value)
        value_size = (value >= 0).sum(1)
        forced = active & ~placed & (filled >= where)
        if guarantee_probe:
            forced |= active & ~placed & (filled + key_size + value_size >= limit)
        key[forced], value[forced] = probe_key[forced], probe_value[forced]
        key_size, value_size = (
            np.where(forced, probe, drawn) for probe, drawn in zip(probe_sizes, (key_size, value_size), strict=True)
        )
        code = np.where(forced, probe_code, code)
        known &= ~forced
        placed |= active & (code == probe_code)
        codes[active, step] = code[active]
        values[active, step] = value[active]
        _append(raw, answers, filled, active, (key, key_size), (value, value_size), known)
        filled += np.where(active, key_size + value_size, 0)
    everywhere = np.ones(count, dtype=bool)
    _append(raw, answers, filled, everywhere, (probe_key, probe_sizes[0]), (probe_value, probe_sizes[1]), everywhere)
    filled += probe_size
    # Pad on the left: position j of the padded sequence was position j - (L + 1 - filled).
    source = np.arange(length + 1) - (length + 1 - filled)[:, None]
    padding = source < 0
    source = np.maximum(source, 0)
    raw = np.where(padding, setting.marker, np.take_along_axis(raw, source, 1))
    answers = np.where(padding, IGNORE, np.take_along_axis(answers, source, 1))
    return shifted(raw, answers, training)


def _motifs(tokens: range, widest: int, size: Ints, rng: Generator) -> Ints:
    """Ordered tuples of distinct tokens, uniform: [n, widest], -1 beyond each one's size.

    The j-th token is the r-th of the tokens not taken yet: r moves up past each taken one, smallest first.
    """
    chosen = np.empty((len(size), widest), dtype=np.int64)
    for j in range(widest):
        pick = rng.integers(0, len(tokens) - j, size=len(size))
        for taken in np.sort(chosen[:, :j], axis=1).T:
            pick += pick >= taken
        chosen[:, j] = pick
    return np.where(np.arange(widest) < size[:, None], chosen + tokens.start, -1)


def _code(motif: Ints, base: int) -> Ints:
    """A number that tells motifs apart: digits token + 1 in the given base."""
    code = np.zeros(len(motif), dtype=np.int64)
    for column in motif.T:
        code = code * base + column + 1
    return code


def _append(
    raw: Ints,
    answers: Ints,
    filled: Ints,
    active: Bools,
    key: tuple[Ints, Ints],
    value: tuple[Ints, Ints],
    known: Bools,
) -> None:
    """Append key and value to the active instances; the value is a target where its key is known."""
    for (motif, size), start, is_value in ((key, filled, False), (value, filled + key[1], True)):
        for j in range(motif.shape[1]):
            chosen = np.flatnonzero(active & (j < size))
            at = start[chosen] + j
            raw[chosen, at] = motif[chosen, j]
            if is_value:
                answers[chosen, at] = np.where(known[chosen], motif[chosen, j], IGNORE)
