"""The MAD generators: the reference's own numbers, bit for bit, and the invariants of every task in both modes."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from efla.experiments.mad import exact
from efla.experiments.mad import tasks as mad
from efla.experiments.mad.exact import IGNORE
from efla.experiments.mad.tasks import TASKS, Setting, baseline, changed, generate, overlap, sweep
from tests.experiments.mad.parse import IGN, answerable, motifs

DIGESTS = {
    "CR": ("a496348be90efaf23096259a8d520aa0ccb54759197493b34623ef40c3abe38d", [56] * 8),
    "NR": ("63d13df3b5f57bb8f4c679960fe52476378debcc053d0c1afa40bc60b51ba42c", [45, 43, 49, 45, 42, 44, 47, 44]),
    "FR": ("f9df45b8bccbfe7d831efec79dff43ed7dfda14fb188edd63e3da96afd17d70b", [6, 5, 4, 8, 2, 3, 4, 5]),
    "SC": ("72e5263bd900903697434b8ba76017dc374e87b3ff3ee0fdfaa035c750bc2215", [16] * 8),
    "C": ("b436bb59d620031c4772951f8efcb41626d807e1f69007f478ad30d27147f33d", [32] * 8),
    "M": ("5b6f584aaff2ab21d0e7673f1e56de37170bd6e63ad26ea0d1b91fa2009eb6c7", [16] * 8),
}
STREAM = "0824e28eca36d8d9"
"""Of the draws below under NumPy 2.4.6, with which the digests were made."""
MODES = pytest.mark.parametrize("bit_exact", [False, True], ids=["fast", "bit-exact"])


def stream_digest() -> str:
    rng, found = np.random.default_rng(12345), hashlib.sha256()
    order = list(range(100))
    rng.shuffle(order)
    for values in (
        rng.choice(100, size=50),
        rng.random(5),
        order,
        np.random.RandomState(12345).randint(0, 16, size=50),
    ):
        found.update(np.asarray(values).astype("<f8").tobytes())
    return found.hexdigest()[:16]


same_stream = pytest.mark.skipif(
    stream_digest() != STREAM, reason=f"NumPy {np.__version__} draws another random stream than 2.4.6"
)


def data_of(task: str, count: int, bit_exact: bool, **changes: object) -> mad.MadData:
    setting = replace(baseline(task), num_train_examples=count, num_test_examples=count, **changes)  # type: ignore[arg-type]
    return generate(setting, bit_exact=bit_exact)


@same_stream
@pytest.mark.parametrize("task", TASKS)
def test_bit_exact_mode_gives_the_reference_generators_numbers(task: str) -> None:
    data = data_of(task, 8, bit_exact=True)
    digest, targets = DIGESTS[TASKS[task]]
    assert data.digest() == digest
    assert (data.test_targets != IGN).sum(1).tolist() == targets


@same_stream
def test_first_instances_are_those_printed_in_the_description() -> None:
    compression = data_of("compression", 1, True).train_inputs[0].tolist()
    assert compression == [10, 3, 11, 4, 3, 11, 9, 10, 14, 5, 12, 4, 8, 8, 3, 2, 3, 10, 9, 14, 10, 3, 13, 14, 10, 10, 1, 1, 3,
                           6, 1, 15]  # fmt: skip
    pairs = list(exact.memorization_map(baseline("memorization"), 12345).items())[:5]
    assert pairs == [(120, 175), (0, 239), (101, 249), (119, 185), (114, 174)]
    recall = data_of("in-context-recall", 1, True).train_inputs[0].tolist()
    assert recall[:16] == [1, 14, 2, 9, 6, 13, 5, 15, 3, 14, 2, 9, 4, 12, 1, 14]


@MODES
@pytest.mark.parametrize("changes", [{}, {"vocab_size": 64}, {"seq_len": 20}], ids=["baseline", "V64", "L20"])
def test_in_context_recall_asks_for_exactly_what_was_shown_before(bit_exact: bool, changes: dict[str, int]) -> None:
    data = data_of("in-context-recall", 60, bit_exact, **changes)
    setting = data.setting
    half = setting.vocab_size // 2
    for inputs, targets in zip(data.test_inputs.tolist(), data.test_targets.tolist(), strict=True):
        assert len(inputs) == len(targets) == setting.seq_len - 1
        assert all(token < half for token in inputs[0::2]) and all(token >= half for token in inputs[1::2])
        answers = answerable(inputs, range(0, len(inputs), 2))
        for position, target in enumerate(targets):
            assert target == answers.get(position, IGN)
        assert is_a_map([(inputs[i], inputs[i + 1]) for i in range(0, len(inputs) - 1, 2)])
        assert sum(target != IGN for target in targets) == setting.seq_len // 2 - len(set(inputs[0::2]))
    assert bool((data.train_targets[:, :-1] == data.train_inputs[:, 1:]).all())
    assert not bool((data.train_targets == IGN).any())
    for raw in raw_training(data):
        assert all(token < half for token in raw[0::2]) and all(token >= half for token in raw[1::2])
        assert is_a_map(list(zip(raw[0::2], raw[1::2], strict=True)))


def is_a_map(pairs: list[tuple[int, int]]) -> bool:
    """Whether equal keys have equal values."""
    return len(set(pairs)) == len({key for key, _ in pairs})


def raw_training(data: mad.MadData) -> list[list[int]]:
    """The sequences of a training set whose targets are its inputs shifted by one."""
    return torch.cat([data.train_inputs, data.train_targets[:, -1:]], 1).tolist()


@MODES
@pytest.mark.parametrize("noise", [0.2, 0.8])
def test_noisy_recall_without_its_noise_pairs_is_recall(bit_exact: bool, noise: float) -> None:
    data = data_of("noisy-in-context-recall", 60, bit_exact, frac_noise=noise)
    n = 16
    for inputs, targets in zip(data.test_inputs.tolist(), data.test_targets.tolist(), strict=True):
        real = [i for i in range(0, len(inputs), 2) if inputs[i] < n]
        for i in range(0, len(inputs) - 1, 2):
            if inputs[i] >= n:
                assert inputs[i + 1] >= n and targets[i] == targets[i + 1] == IGN
            else:
                assert inputs[i] < n // 2 <= inputs[i + 1] < n
        assert real[-1] == len(inputs) - 1, "the last pair is never noise"
        answers = answerable(inputs, real)
        assert targets == [answers.get(i, IGN) for i in range(len(inputs))]
        assert targets[-1] != IGN
        assert is_a_map([(inputs[i], inputs[i + 1]) for i in real[:-1]])
    assert bool((data.train_targets[:, :-1] == data.train_inputs[:, 1:]).all())
    for raw in raw_training(data):
        pairs = list(zip(raw[0::2], raw[1::2], strict=True))
        assert all((key >= n) == (value >= n) for key, value in pairs) and pairs[-1][0] < n
        assert is_a_map([pair for pair in pairs if pair[0] < n])


@MODES
def test_share_and_values_of_the_noise_are_as_told(bit_exact: bool) -> None:
    data = data_of("noisy-in-context-recall", 2000, bit_exact)
    slots = data.test_inputs[:, 0:126:2] >= 16  # the first P - 1 slots
    share, pairs = float(slots.double().mean()), 64
    # Slots of an instance are not independent: the protected one is drawn once per instance. Standard error over instances.
    error = float(slots.double().mean(1).std()) / 2000**0.5
    assert abs(share - 0.2 * (1 - 1 / pairs)) < 3 * error
    noise = torch.cat([data.test_inputs, data.train_inputs])
    counts = torch.bincount(noise[noise >= 16] - 16, minlength=16).double()
    assert chi_square(counts) < 37.7  # 15 degrees of freedom, 1e-3


@MODES
@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["plain", "noisy"])
@pytest.mark.filterwarnings("ignore:.*also occur in the training set")
def test_the_probe_is_any_of_the_keys_shown_equally_often(bit_exact: bool, noise: float) -> None:
    """Of 8 keys with 5 slots: which of the keys shown is asked for at the end, counted from the smallest."""
    sizes = {"noise_vocab_size": 4, "vocab_size": 20} if noise else {"vocab_size": 16}
    task = "noisy-in-context-recall" if noise else "in-context-recall"
    data = data_of(task, 1500, bit_exact, seq_len=12, frac_noise=noise, **sizes)
    ranks = {num_shown: torch.zeros(num_shown).double() for num_shown in range(1, 6)}
    for inputs in (*data.train_inputs.tolist(), *data.test_inputs.tolist()):
        *keys, probe = inputs[0::2]
        shown = sorted({key for key in keys if key < 8})
        ranks[len(shown)][shown.index(probe)] += 1
    at_1e_3 = {2: 10.8, 3: 13.8, 4: 16.3, 5: 18.5}  # chi-square with one degree of freedom less
    for num_shown, counts in ranks.items():
        if counts.sum() >= 100 and num_shown > 1:
            assert chi_square(counts) < at_1e_3[num_shown], (num_shown, counts)
    assert sum(counts.sum() >= 100 for counts in ranks.values()) >= 3


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@MODES
@pytest.mark.filterwarnings("ignore:.*also occur in the training set")
def test_an_instance_of_nothing_but_noise_is_drawn_again(bit_exact: bool) -> None:
    setting = Setting(
        task="noisy-in-context-recall", vocab_size=8, seq_len=6, noise_vocab_size=4, frac_noise=0.95,
        num_train_examples=50, num_test_examples=200,
    )  # fmt: skip
    data = generate(setting, bit_exact=bit_exact)
    assert bool((data.test_inputs[:, 0:4:2] < 4).any(1).all())


@MODES
@pytest.mark.parametrize("guarantee", [False, True], ids=["as the reference", "guaranteed"])
def test_fuzzy_recall_parses_into_motifs_and_asks_for_whole_values(bit_exact: bool, guarantee: bool) -> None:
    count = 120 if bit_exact else 1280
    setting = replace(baseline("fuzzy-in-context-recall"), num_train_examples=120, num_test_examples=count)
    data = generate(setting, bit_exact=bit_exact, guarantee_probe=guarantee)
    probe_shown = 0
    for inputs, targets in zip(data.test_inputs.tolist(), data.test_targets.tolist(), strict=True):
        assert len(inputs) == len(targets) == 128
        last = [target for target in targets if target != IGN][-1]
        raw = [*inputs, last]
        pads, pairs = motifs(raw, num_keys=7, pad=15)
        assert 2 <= pads <= 7 and 15 not in raw[pads:]
        expected, remembered = [IGN] * 128, {}
        for i, (start, key, value) in enumerate(pairs):
            assert len(key) == 3 and 1 <= len(value) <= 3
            assert len(set(key)) == len(key) and len(set(value)) == len(value)
            is_last = i == len(pairs) - 1
            if key in remembered:
                assert remembered[key] == value
            if key in remembered or is_last:
                expected[start - 1 : start - 1 + len(value)] = value
            probe_shown += is_last and key in remembered
            remembered[key] = value
        assert targets == expected
    if guarantee:
        assert probe_shown == count
    else:
        assert probe_shown / count >= 0.96
    for inputs, targets in zip(data.train_inputs.tolist(), data.train_targets.tolist(), strict=True):
        assert targets[:-1] == inputs[1:]
        pads, pairs = motifs([*inputs, targets[-1]], num_keys=7, pad=15)
        assert 2 <= pads <= 7
        assert all(1 <= len(key) <= 3 and 1 <= len(value) <= 3 for _, key, value in pairs)
        assert all(len(set(motif)) == len(motif) for _, *pair in pairs for motif in pair)
        value_of = dict((key, value) for _, key, value in pairs)
        assert all(value_of[key] == value for _, key, value in pairs), "equal key motifs have equal value motifs"


@pytest.mark.parametrize("length", [64, 256, 1024])
def test_fuzzy_recall_has_two_to_seven_pads_whatever_its_length(length: int) -> None:
    data = data_of("fuzzy-in-context-recall", 40, False, seq_len=length)
    for inputs in (data.train_inputs, data.test_inputs):
        pads = (inputs == 15).sum(1)
        assert 2 <= int(pads.min()) <= int(pads.max()) <= 7
        assert bool(((inputs == 15) == (torch.arange(length) < pads[:, None])).all()), "pads stand in front"


def test_the_probe_is_missing_about_as_often_as_in_the_reference() -> None:
    data = data_of("fuzzy-in-context-recall", 4000, False)
    missing = 0
    for inputs, targets in zip(data.test_inputs.tolist(), data.test_targets.tolist(), strict=True):
        _, pairs = motifs([*inputs, targets[-1]], 7, 15)
        missing += pairs[-1][1] not in {key for _, key, _ in pairs[:-1]}
    assert 0.018 <= missing / 4000 <= 0.025  # measured on the reference: 1.8 to 2.5 %


@MODES
@pytest.mark.parametrize("copied", [16, 5])
def test_selective_copying_asks_for_the_content_in_order(bit_exact: bool, copied: int) -> None:
    data = data_of("selective-copying", 100, bit_exact, num_tokens_to_copy=copied)
    L, c = 256, copied
    for inputs, targets in zip(
        [*data.train_inputs.tolist(), *data.test_inputs.tolist()],
        [*data.train_targets.tolist(), *data.test_targets.tolist()],
        strict=True,
    ):
        assert [i for i, token in enumerate(inputs) if token == 15] == [L - c - 1]
        before, after = inputs[: L - c - 1], inputs[L - c :]
        assert after == [14] * c
        content = [token for token in before if token != 14]
        assert targets == [IGN] * (L - c) + content
        assert before.count(14) == L - 2 * c - 1
        assert before[-1] < 14


@MODES
def test_blanks_fall_uniformly_between_the_tokens_to_copy(bit_exact: bool) -> None:
    """None of the B blanks stands before the first of c tokens with probability (1 - 1/c)^B."""
    count, c, blanks = 2000, 5, 6
    data = data_of("selective-copying", count, bit_exact, num_tokens_to_copy=c, seq_len=2 * c + 1 + blanks)
    expected = (1 - 1 / c) ** blanks
    share = (data.train_inputs[:, 0] < 14).double().mean().item()
    assert abs(share - expected) < 3 * (expected * (1 - expected) / count) ** 0.5


@MODES
def test_compression_targets_are_the_inputs_and_content_is_uniform_and_independent(bit_exact: bool) -> None:
    data = data_of("compression", 3000, bit_exact)
    for inputs, targets in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
        assert torch.equal(inputs, targets) and inputs.shape == (3000, 32)
        assert bool((inputs[:, -1] == 15).all()) and not bool((inputs[:, :-1] == 15).any())
    inputs = data.train_inputs
    assert chi_square(torch.bincount(inputs[:, :-1].flatten()).double()) < 36.1  # 14 degrees of freedom, 1e-3
    joint = torch.bincount(15 * inputs[:, 3] + inputs[:, 20], minlength=225).double()
    assert chi_square(joint) < 296  # 224 degrees of freedom, 1e-3


@MODES
def test_memorisation_has_one_fixed_one_to_one_map(bit_exact: bool) -> None:
    data = data_of("memorization", 300, bit_exact)
    value_of: dict[int, int] = {}
    for inputs, targets in zip(
        [*data.train_inputs.tolist(), *data.test_inputs.tolist()],
        [*data.train_targets.tolist(), *data.test_targets.tolist()],
        strict=True,
    ):
        assert inputs[1::2] == [255] * 16 and all(token < 127 for token in inputs[0::2])
        assert targets[0::2] == [IGN] * 16 and all(127 <= target < 255 for target in targets[1::2])
        for key, value in zip(inputs[0::2], targets[1::2], strict=True):
            assert value_of.setdefault(key, value) == value
    assert len(set(value_of.values())) == len(value_of)


def test_the_memorisation_map_does_not_depend_on_length_or_set_size() -> None:
    one = baseline("memorization")
    other = replace(one, seq_len=8, num_train_examples=3)
    assert exact.memorization_map(one, 7) == exact.memorization_map(other, 7) != exact.memorization_map(one, 8)


@same_stream
def test_large_vocabularies_have_the_ceiling_that_was_measured() -> None:
    seen, ceilings = {}, {}
    for setting in sweep("memorization"):
        data = generate(setting)
        keys = set(data.train_inputs[:, 0::2].flatten().tolist())
        asked = data.test_inputs[:, 0::2].flatten()
        seen[setting.vocab_size] = len(keys)
        ceilings[setting.vocab_size] = round(
            100 * float(torch.isin(asked, torch.tensor(sorted(keys))).double().mean()), 1
        )
    assert seen == {256: 127, 512: 255, 1024: 511, 2048: 1010, 4096: 1778, 8192: 2586}
    assert ceilings == {256: 100, 512: 100, 1024: 100, 2048: 98.8, 4096: 87.1, 8192: 64.0}


@pytest.mark.parametrize(
    ("task", "parameter", "value", "mean"),
    [
        ("in-context-recall", "vocab_size", 32, 48.3), ("in-context-recall", "vocab_size", 64, 36.4),
        ("in-context-recall", "vocab_size", 128, 23.6), ("in-context-recall", "seq_len", 256, 120),
        ("in-context-recall", "seq_len", 512, 248), ("in-context-recall", "seq_len", 1024, 504),
        ("noisy-in-context-recall", "frac_noise", 0.2, 43.4), ("noisy-in-context-recall", "frac_noise", 0.4, 31.3),
        ("noisy-in-context-recall", "frac_noise", 0.6, 18.9), ("noisy-in-context-recall", "frac_noise", 0.8, 7.8),
        ("fuzzy-in-context-recall", "vocab_size", 16, 4.4), ("fuzzy-in-context-recall", "vocab_size", 32, 2.3),
        ("fuzzy-in-context-recall", "seq_len", 256, 12.1), ("fuzzy-in-context-recall", "seq_len", 1024, 147.5),
    ],
)  # fmt: skip
def test_fast_generation_asks_for_as_many_targets_as_the_reference(
    task: str, parameter: str, value: float, mean: float
) -> None:
    data = generate(replace(changed(task, parameter, value), num_train_examples=1, num_test_examples=2500))
    counts = (data.test_targets != IGN).sum(1).double()
    error = float(counts.std()) / 2500**0.5
    assert abs(float(counts.mean()) - mean) < 4 * error + 0.15  # the printed mean is rounded and has an error itself


def test_motifs_drawn_side_by_side_are_uniform_over_ordered_tuples() -> None:
    from efla.experiments.mad.fast import _motifs

    size = np.full(42_000, 3)
    found = _motifs(range(2, 9), 3, size, np.random.default_rng(0))
    codes = (found - 2) @ [49, 7, 1]
    counts = torch.bincount(torch.from_numpy(codes), minlength=343).double()
    possible = [49 * a + 7 * b + c for a, b, c in itertools.permutations(range(7), 3)]
    assert counts[possible].sum() == 42_000
    assert chi_square(counts[possible]) < 276  # 209 degrees of freedom, 1e-3
    shorter = _motifs(range(7), 3, np.full(5, 1), np.random.default_rng(0))
    assert (shorter[:, 1:] == -1).all() and (shorter[:, 0] >= 0).all()


@MODES
@pytest.mark.parametrize("task", TASKS)
def test_a_seed_fixes_the_data_and_the_test_set_continues_the_stream(task: str, bit_exact: bool) -> None:
    one, again = data_of(task, 12, bit_exact), data_of(task, 12, bit_exact)
    assert one.digest() == again.digest()
    setting = one.setting
    assert generate(setting, 12346, bit_exact=bit_exact).digest() != one.digest()
    assert not torch.equal(one.train_inputs, one.test_inputs)


def test_generation_leaves_numpys_global_state_alone() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()  # type: ignore[union-attr, index]
    data_of("selective-copying", 5, True)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[union-attr, index]


def test_overlap_of_training_and_test_inputs_is_measured_and_told() -> None:
    assert overlap(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [1, 2], [5, 6], [7, 8]])) == pytest.approx(1 / 3)
    tiny = Setting(task="compression", vocab_size=3, seq_len=3, num_train_examples=50, num_test_examples=50)
    with pytest.warns(UserWarning, match="also occur in the training set"):
        assert generate(tiny).overlap == 1


def test_datasets_are_torch_datasets() -> None:
    data = data_of("compression", 10, False)
    inputs, targets = next(iter(torch.utils.data.DataLoader(data.train, batch_size=4)))
    assert inputs.shape == targets.shape == (4, 32)
    assert len(data.test) == 10
    assert mad.IGNORE == IGNORE == IGN
