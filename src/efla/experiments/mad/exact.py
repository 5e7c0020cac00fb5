"""Instances drawn one at a time in the reference generator's order: bit-identical to the published data.

Every function takes the setting and one ``numpy.random.Generator`` and returns ``(inputs, targets)`` of equal length.
Recall tasks mask the targets of test instances and shift the inputs for training instances; in the others ``training``
makes no difference.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator, RandomState
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from efla.experiments.mad.tasks import Setting

IGNORE = -100
"""A target with this value counts neither in the loss nor in the metric."""

Ints = NDArray[np.int64]
Instance = tuple[Ints, Ints]


def in_context_recall(setting: Setting, rng: Generator, *, training: bool) -> Instance:
    """Plain and noisy multi-query recall: key-value pairs, the value asked for wherever its key was shown before.

    An instance in which every slot is noise (possible only if the protected slot is the last one) is drawn again.
    """
    pairs = setting.seq_len // 2
    while True:
        protected = int(rng.choice(pairs))
        remembered: dict[int, int] = {}
        raw: list[int] = []
        answers: list[int] = []
        for slot in range(pairs - 1):
            if setting.frac_noise > 0 and slot != protected and rng.random() < setting.frac_noise:
                noise = rng.choice(setting.noise_vocab_size, size=2, replace=True) + setting.pair_vocab_size
                raw += noise.tolist()
                answers += [IGNORE, IGNORE]
                continue
            key = int(rng.choice(len(setting.keys)))
            shown = key in remembered
            if not shown:
                remembered[key] = setting.values[int(rng.choice(len(setting.values)))]
            raw += [key, remembered[key]]
            answers += [IGNORE, remembered[key] if shown else IGNORE]
        if remembered:
            break
    probe = list(remembered)[int(rng.choice(len(remembered)))]
    raw += [probe, remembered[probe]]
    answers += [IGNORE, remembered[probe]]
    return shifted(raw, answers, training)


def fuzzy_in_context_recall(
    setting: Setting, rng: Generator, *, training: bool, guarantee_probe: bool = False
) -> Instance:
    """Recall of value motifs by key motifs (ordered tuples of distinct tokens), left-padded.

    ``guarantee_probe`` shows the probe in the last iteration at the latest.
    """
    kmax, vmax, length = setting.k_motif_size, setting.v_motif_size, setting.seq_len
    key_sizes = range(1, kmax + 1) if training else range(kmax, kmax + 1)
    key_motifs = {size: _shuffled_motifs(setting.keys, size, rng) for size in key_sizes}
    value_motifs = {size: _shuffled_motifs(setting.values, size, rng) for size in range(1, vmax + 1)}

    def draw_key_size() -> int:
        return 1 + int(rng.choice(kmax)) if training else kmax

    def draw(motifs: list[tuple[int, ...]]) -> tuple[int, ...]:
        return motifs[int(rng.choice(len(motifs)))]

    key_size, value_size = draw_key_size(), 1 + int(rng.choice(vmax))
    probe_key, probe_value = draw(key_motifs[key_size]), draw(value_motifs[value_size])
    probe_size = key_size + value_size
    where = int(rng.choice(length - 2 * probe_size))
    limit = length - probe_size - (kmax + vmax)
    remembered: dict[tuple[int, ...], tuple[int, ...]] = {}
    raw: list[int] = []
    answers: list[int] = []
    while len(raw) < limit:
        key_size, value_size = draw_key_size(), 1 + int(rng.choice(vmax))
        if len(raw) >= where and probe_key not in remembered:
            key, value = probe_key, probe_value
        else:
            key = draw(key_motifs[key_size])
            if key == probe_key:
                value = probe_value
            else:
                value = remembered[key] if key in remembered else draw(value_motifs[value_size])
            if guarantee_probe and probe_key not in remembered and len(raw) + len(key) + len(value) >= limit:
                key, value = probe_key, probe_value
        raw += [*key, *value]
        answers += [IGNORE] * len(key) + (list(value) if key in remembered else [IGNORE] * len(value))
        remembered[key] = value
    raw += [*probe_key, *probe_value]
    answers += [IGNORE] * len(probe_key) + list(probe_value)
    pads = length + 1 - len(raw)
    return shifted([setting.marker] * pads + raw, [IGNORE] * pads + answers, training)


def selective_copying(setting: Setting, rng: Generator, slots_rng: RandomState, *, training: bool = False) -> Instance:
    """Content scattered among blanks, then a marker, then blanks at which the content is asked for in order."""
    count = setting.num_tokens_to_copy
    blanks = setting.seq_len - 2 * count - 1
    content = rng.choice(setting.vocab_size - 2, size=count, replace=True)
    slots = slots_rng.randint(0, count, size=blanks)  # a slot puts a blank before the content token of that number
    before = np.bincount(slots, minlength=count)
    inputs = np.full(setting.seq_len, setting.blank, dtype=np.int64)
    inputs[np.arange(count) + before.cumsum()] = content
    inputs[count + blanks] = setting.marker
    targets = np.full(setting.seq_len, IGNORE, dtype=np.int64)
    targets[-count:] = content
    return inputs, targets


def compression(setting: Setting, rng: Generator, *, training: bool = False) -> Instance:
    """Random content and a marker; the targets are the inputs."""
    content = rng.choice(setting.vocab_size - 1, size=setting.seq_len - 1, replace=True)
    inputs = np.append(content, setting.marker).astype(np.int64)
    return inputs, inputs.copy()


def memorization_map(setting: Setting, seed: int) -> dict[int, int]:
    """The fixed key-value map. It depends only on the vocabulary and the seed, and has its own generator."""
    rng = np.random.default_rng(seed)
    keys, values = list(setting.keys), list(setting.values)
    rng.shuffle(keys)
    rng.shuffle(values)
    return dict(zip(keys, values, strict=False))  # one value may be left over


def memorization(setting: Setting, rng: Generator, value_of: dict[int, int], *, training: bool = False) -> Instance:
    """Keys, each followed by a marker at which the key's fixed value is asked for."""
    half = setting.seq_len // 2
    keys = list(value_of)  # in the map's shuffled order: the number drawn is an index into it
    rng.choice(half)  # the slot protected from noise; unused here, but it advances the stream
    inputs = np.full(setting.seq_len, setting.marker, dtype=np.int64)
    targets = np.full(setting.seq_len, IGNORE, dtype=np.int64)
    for i in range(half):
        key = keys[int(rng.choice(len(keys)))]
        inputs[2 * i] = key
        targets[2 * i + 1] = value_of[key]
    return inputs, targets


def shifted(raw: ArrayLike, answers: ArrayLike, training: bool) -> Instance:
    """Inputs without the last token; targets one position ahead: every token in training, the answers in test."""
    inputs, targets = (np.asarray(tokens, dtype=np.int64) for tokens in (raw, raw if training else answers))
    return np.ascontiguousarray(inputs[..., :-1]), np.ascontiguousarray(targets[..., 1:])


def _shuffled_motifs(tokens: range, size: int, rng: Generator) -> list[tuple[int, ...]]:
    motifs = list(permutations(tokens, size))
    rng.shuffle(motifs)
    return motifs
