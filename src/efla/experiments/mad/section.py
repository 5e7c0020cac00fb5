"""The MAD section of the report: bars per task, scores beside published ones, a verdict per claim."""

import math
from collections.abc import Sequence

from efla.experiments.mad.claims import METRICS, PAPER, Runs, claims, percent, published
from efla.experiments.mad.config import TASK_ORDER
from efla.experiments.mad.tasks import OVERLAP_WARNING
from efla.runs.chart import Chart, Figure, Series, over_seeds, seed_point
from efla.runs.names import name_of
from efla.runs.records import Record, number
from efla.runs.sections import Section, Table, applicable, budget, settings_table
from efla.runs.statistics import Spread, spread

TITLES = {
    "memorization": "Memorize",
    "compression": "Compress",
    "in-context-recall": "In-context recall",
    "noisy-in-context-recall": "Noisy recall",
    "fuzzy-in-context-recall": "Fuzzy recall",
    "selective-copying": "Selective copying",
}


def sections(rows: Sequence[Record], source: str) -> list[Section]:
    """One section: six panels of bars, six of training curves, tables."""
    runs = Runs(rows)
    note = (
        "The best of the learning rates (and weight decays); mean over seeds ± one standard deviation, seeds as dots."
    )
    figures = [
        Figure("mad", "Accuracy by task and setting", note, [_bars(runs, task) for task in runs.tasks]),
        Figure(
            "mad-training",
            "Training loss, each task's first setting",
            "The best run of each seed; mean over the seeds that got that far. A curve ends where its runs stopped early.",
            [_curves(runs, task) for task in runs.tasks],
        ),
    ]
    return [
        Section(
            key="mad",
            title=f"MAD: six synthetic tasks ({runs[0]['profile']} profile)",
            source=source,
            question="Which single skills does the exact step help: recalling, copying, compressing, memorising?",
            intro=(
                "Small models with two mixers learn six tasks that each need one skill: recalling (plain, among noise, by "
                "motifs of several tokens), copying selectively, compressing, memorising."
            ),
            claims=claims(rows),
            figures=figures,
            tables=[_published_table(runs), _settings(runs), _every_run(runs)],
            settings=settings_table(runs),
            data=sorted({f"{row['task']}: {row['data']['source']}" for row in runs}),
            budget=budget(runs),
            not_concluded=_not_concluded(runs),
        )
    ]


def _spread(runs: Runs, task: str, setting: str, arm: str, metric: str = "reference_accuracy") -> Spread:
    """A setting's score over seeds."""
    return spread(runs.scores(task, setting, arm, metric).values())


def _bars(runs: Runs, task: str) -> Chart:
    series = []
    for arm in runs.arms:
        scores = {name: _spread(runs, task, name, arm) for name in runs.settings(task)}
        points = [seed_point(name, score, 100, dots=True) for name, score in scores.items() if score.n]
        series.append(Series(arm, name_of(arm), points))
    return Chart(TITLES[task], "setting", "reference accuracy, %", series, (0, 100), kind="bars")


def _curves(runs: Runs, task: str) -> Chart:
    setting = runs.settings(task)[0]
    series = [over_seeds(arm, runs.loss_curve(task, setting, arm), digits=3) for arm in runs.arms]
    top = max((point.y for one in series for point in one.points if math.isfinite(point.y)), default=1.0)
    return Chart(f"{TITLES[task]}, {setting}", "optimiser step", "training loss", series, (0, 1.05 * top))


def _published_table(runs: Runs) -> Table:
    """Task scores of our arms and, below them, published ones."""
    lines = []
    for arm in runs.arms:
        scores = (runs.task_score(task, arm).text(100) for task in TASK_ORDER)
        lines.append([f"ours: {name_of(arm)}", percent(runs.overall_score(arm)), *scores])
    for row in published():
        lines.append([f"{row['model']} ({row['source']})", row["mean"], *(row[task] for task in TASK_ORDER)])
    for model, mean in PAPER.items():
        lines.append([f"{model} (EFLA paper, averages only)", str(mean), *("" for _ in TASK_ORDER)])
    title = f"Task scores in %, published ones below. {runs.comparability()}"
    return Table(title, ["model", "mean", *(TITLES[task] for task in TASK_ORDER)], lines)


def _settings(runs: Runs) -> Table:
    """Both accuracies of every setting, at the best checkpoint and at the end, and the dropped runs."""
    lines = []
    for task in runs.tasks:
        for name in runs.settings(task):
            for metric, label in METRICS.items():
                values = [_spread(runs, task, name, arm, metric).text(100) for arm in runs.arms]
                lines.append([f"{TITLES[task]}, {name}", label, *values])
    dropped = [str(runs.nonfinite(arm)) for arm in runs.arms]
    lines.append(["all", "runs dropped because not finite", *dropped])
    return Table("Every setting, both metrics, in %", ["setting", "metric", *map(name_of, runs.arms)], lines)


def _every_run(runs: Runs) -> Table:
    columns = ["task", "setting", "model", "rate", "decay", "seed", "parameters", "steps", "best step", "reference, %",
               "at the end, %", "token, %", "test loss", "ms per step", "backend", "wall, s"]  # fmt: skip
    lines = [
        [TITLES[row["task"]], row["setting"], name_of(row["arm"]), f"{row['rate']:g}", f"{row['decay']:g}", str(row["seed"]),
         f"{row['parameters']:,}", f"{row['steps']} of {row['budget']}", str(row["best_step"]),
         percent(number(row["reference_accuracy"])), percent(number(row["reference_accuracy_last"])),
         percent(number(row["token_accuracy"])), f"{number(row['test_loss']):.4f}",
         f"{1000 * row['timing']['seconds_per_step']:.0f}", row["backend"], f"{row['wall_seconds']:.0f}"]
        for row in runs
    ]  # fmt: skip
    return Table("Every run", columns, lines)


def _not_concluded(runs: Runs) -> list[str]:
    """The limits of these rows."""
    tasks, arms, whole = runs.tasks, runs.arms, runs.follow_the_reference()
    missing = ", ".join(TITLES[task] for task in TASK_ORDER if task not in tasks)
    one_seed = ", ".join(
        f"{TITLES[task]} {name}"
        for task in tasks
        for name in runs.settings(task)
        if max(len(runs.scores(task, name, arm)) for arm in arms) < 2
    )
    scores = {task: [_spread(runs, task, runs.settings(task)[0], arm) for arm in arms] for task in tasks}
    solved = ", ".join(TITLES[task] for task in tasks if all(score.mean > 0.99 for score in scores[task] if score.n))
    overlaps = {(row["task"], row["setting"], row["data"]["overlap"]) for row in runs}
    shared = ", ".join(sorted(f"{TITLES[t]} {name} ({x:.1%})" for t, name, x in overlaps if x > OVERLAP_WARNING))
    return applicable(
        (missing, f"Anything about {missing}: not run yet."),
        (not whole, runs.comparability()),
        (True, "That a difference between EFLA and DeltaNet is due to the rule: they differ in rule and key norm at once. "
               "Only DeltaNet (raw keys) differs from EFLA in the rule alone."),
        (True, "That the scores are free of selection: checkpoint, learning rate and early stop look at the test set, as in "
               "the reference. The scores at the end of training are in the folded table."),
        (whole, "That 0.7 points are an effect: three published DeltaNet averages (71.8, 69.7, 65.7) span 6 points."),
        (one_seed, f"Any verdict on {one_seed}: run with one seed, so the spread is unknown."),
        (solved, f"Which arm is better at {solved}: every arm solves the baseline (above 99 %), so nothing is left to tell."),
        ("fuzzy-in-context-recall" in tasks and not runs[0]["config"]["guarantee_probe"],
         "That 100 % can be reached in fuzzy recall: about 2 % of its baseline instances ask for a motif never shown, as in the "
         "reference (--guarantee-probe shows it always)."),
        (shared, f"That nothing was learnt by heart in {shared}: so many test inputs also occur in training."),
    )  # fmt: skip
