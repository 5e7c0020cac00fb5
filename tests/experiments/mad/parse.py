"""Independent readings of MAD instances, against which the generators are held."""

from __future__ import annotations

from collections.abc import Sequence

IGN = -100


def answerable(inputs: Sequence[int], positions: Sequence[int]) -> dict[int, int]:
    """Position -> answer of the key positions whose key stood at an earlier one of them: the token that followed there."""
    followed: dict[int, int] = {}
    found = {}
    for position in positions:
        key = inputs[position]
        if key in followed:
            found[position] = followed[key]
        elif position + 1 < len(inputs):
            followed[key] = inputs[position + 1]
    return found


def motifs(
    raw: Sequence[int], num_keys: int, pad: int
) -> tuple[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]:
    """Number of pads, and the pairs (start of the value, key motif, value motif) of a fuzzy-recall sequence."""
    pads = 0
    while raw[pad_index := pads] == pad:
        pads = pad_index + 1
    position, pairs = pads, []
    while position < len(raw):
        start = position
        while position < len(raw) and raw[position] < num_keys:
            position += 1
        value_start = position
        while position < len(raw) and num_keys <= raw[position] != pad:
            position += 1
        pairs.append((value_start, tuple(raw[start:value_start]), tuple(raw[value_start:position])))
        assert position > value_start > start, "a key run is followed by a value run"
    return pads, pairs
