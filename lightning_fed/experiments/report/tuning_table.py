"""Tuned values of a sweep's methods: which were tried and chosen, and their scores."""

from collections.abc import Sequence
from math import isnan

from lightning_fed.experiments.report.layout import Entry, Layout
from lightning_fed.experiments.report.views import in_percent
from lightning_fed.experiments.sweep.plan import Sweep
from lightning_fed.experiments.sweep.tuning import Trial, at_edges, chosen, grouped, inequality


def tuning_tables(sweep: Sweep, tried: Sequence[Trial]) -> list[Layout]:
    """A row per method and setting; empty without tuning."""
    rows, groups, best = list[list[Entry]](), dict[int, str](), chosen(tried)
    for (setting, method), trials in grouped(tried).items():
        if setting and setting not in groups.values():
            groups[len(rows)] = setting
        rows.append([Entry(method), *_row(sweep, trials, best.get((setting, method)))])
    if not rows:
        return []
    partition, seed = sweep.trials[0].draw
    notes = [
        f"Values were chosen by the monitored metric on validation data, on partition {partition} and training seed {seed} alone; "
        "all seeds were run with them.",
        inequality(sweep),
    ]
    columns = ["", "values tried", "chosen", "validation", "second best", "worst"]
    return [Layout("Tuning", columns, rows, list(filter(None, notes)), groups)]


def _row(sweep: Sweep, trials: Sequence[Trial], best: str | None) -> list[Entry]:
    """The values of a method, from best to worst."""
    between = "; " if any(", " in trial.cell.value for trial in trials) else ", "  # lr=0.1, epochs=2 is one value
    values = (trial.cell.value + ("" if trial.status == "finished" else f" ({trial.status})") for trial in trials)
    tried = Entry(between.join(values))
    known = sorted((trial for trial in trials if not isnan(trial.score)), key=lambda trial: -trial.score)
    if best is None or not known:
        return [tried, Entry("not yet"), *[Entry("–")] * 3]
    edges = at_edges(sweep, known[0].cell.method, best)
    note = "At an edge of what was tried: a better value may lie beyond." if edges else ""
    scores = [Entry(score_text(trial)) for trial in (known[0], *known[1:2], *known[-1:][: len(known) - 1])]
    return [tried, Entry(best, note=note), *scores, *[Entry("–")] * (3 - len(scores))]


def score_text(trial: Trial) -> str:
    """The metric on validation data, as text."""
    value = trial.score if trial.higher_is_better else -trial.score
    return f"{100 * value:.2f} %" if in_percent(trial.metric) else f"{value:.4g}"
