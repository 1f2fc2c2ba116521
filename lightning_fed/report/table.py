"""The table of a comparison: methods down, what they reached and cost across."""

from collections.abc import Callable, Iterable, Sequence
from math import isnan

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.report.comparison import Difference, best_group, difference
from lightning_fed.report.layout import Entry, Layout
from lightning_fed.report.runs import lower_is_better, measure_of
from lightning_fed.sweep.plan import Published

BLANK = Entry("")


def tables(
    runs: pd.DataFrame, baseline: str | None = None, pooled: bool = False, published: Sequence[Published] = ()
) -> list[Layout]:
    """A table per setting.

    Args:
        runs: as :func:`lightning_fed.report.load_runs` gives them, or its CSV file. Runs that are not finished are left out.
        baseline: the method that differences are to; None: the clients alone (``Standalone``) if they are there, else the first.
        pooled: also show the accuracy over all clients' examples together.
        published: numbers of others, shown beside ours.

    Raises:
        FederationError: if there is no such baseline, or no finished run.
    """
    finished = runs[runs["rounds"] >= runs["planned"]]
    if finished.empty:
        raise FederationError(f"None of the {len(runs)} runs is finished: play them to their last round first.")
    return [
        _table(group, str(setting), baseline, pooled, [entry for entry in published if entry.setting == setting])
        for setting, group in finished.groupby("setting", sort=False)
    ]


def unfinished(runs: pd.DataFrame) -> list[str]:
    """A line for each run that a table leaves out."""
    rest = runs[runs["rounds"] < runs["planned"]]
    return [f"Left out: {row.folder} has finished {row.rounds} of {row.planned} rounds." for row in rest.itertuples()]


def baseline_of(runs: pd.DataFrame, baseline: str | None) -> str:
    """The method that differences are to."""
    methods = list(runs["method"].unique())
    alone = list(runs.loc[runs["model"] == "Standalone", "method"])
    chosen = baseline if baseline is not None else (alone or methods)[0]
    if chosen not in methods:
        raise FederationError(f"There is no method {chosen!r} to be the baseline; there are {', '.join(methods)}.")
    return str(chosen)


def _table(runs: pd.DataFrame, setting: str, baseline: str | None, pooled: bool, published: Sequence[Published]) -> Layout:
    metric, reference = str(runs["metric"].iloc[0]), baseline_of(runs, baseline)
    scale, unit = (100.0, " (%)") if measure_of(metric) == "accuracy" else (1.0, "")
    by_method = {str(method): group.set_index("seed") for method, group in runs.groupby("method", sort=False)}
    views = ["last", "selected", "worst_tenth", *(["pooled"] if pooled else [])]
    views = [view for view in views if runs[view].notna().any()]
    best = {view: best_group({m: group[view] for m, group in by_method.items()}, lower_is_better(metric)) for view in views}
    apart = {m: difference(group["last"], by_method[reference]["last"]) for m, group in by_method.items() if m != reference}
    seeds = sorted(runs["seed"].unique())
    costs = _costs(runs)
    theirs = {entry.method: entry for entry in published}

    rows = []
    for method, group in by_method.items():
        name = method if len(group) == len(seeds) else f"{method} ({len(group)} of {len(seeds)} seeds)"
        row = [Entry(name), *(Entry(spread(group[view] * scale), method in best[view]) for view in views)]
        if apart:
            row.append(Entry(said_of(apart[method], scale)) if method in apart else Entry("–"))
        row += [Entry(cost(group)) for cost in costs.values()]
        if theirs:
            row.append(Entry(_said_elsewhere(theirs[method])) if method in theirs else BLANK)
        rows.append(row)
    headers = [f"{HEADERS[view]}{unit}" for view in views]
    headers += [f"last, minus {reference}"] if apart else []
    headers += [*costs, *(["published"] if theirs else [])]
    majority = runs.drop_duplicates("seed")["majority"] * scale
    if measure_of(metric) == "accuracy" and majority.notna().any():
        rows.append([Entry("majority label"), Entry(spread(majority)), *[BLANK] * (len(headers) - 1)])
    return Layout(setting, ["", *headers], rows, _notes(metric, seeds, bool(apart), views, theirs.values()))


HEADERS = {"last": "last round", "selected": "best on validation", "worst_tenth": "worst tenth of clients", "pooled": "pooled"}


def _notes(metric: str, seeds: Sequence[int], differences: bool, views: Sequence[str], theirs: Iterable[Published]) -> list[str]:
    """What must be known to read the table."""
    listed = ", ".join(map(str, seeds))
    several = len(seeds) > 1
    notes = [f"{metric}: {f'mean ± standard deviation over seeds {listed}' if several else f'seed {listed} alone'}."]
    if "selected" in views:
        notes.append("Best on validation: at the round that is best on validation data.")
    if differences and several:
        notes.append(
            "Differences are paired by seed, with Student's 95 % interval; not separated: 0 lies inside. Bold: the best mean of a "
            "column and what is not separated from it."
        )
    sources = dict.fromkeys(entry.source for entry in theirs if entry.source)
    return notes + ([f"Published: {', '.join(sources)}."] if sources else [])


def _costs(runs: pd.DataFrame) -> dict[str, Callable[[pd.DataFrame], str]]:
    """How each cost is written, by its header."""
    written: dict[str, Callable[[pd.DataFrame], str]] = {
        "rounds × epochs": lambda group: f"{group['rounds'].iloc[0]} × {group['epochs'].iloc[0] or '?'}",
        "bytes sent": lambda group: sized(group["bytes"].mean()),
        "training FLOPs": lambda group: rough(group["flops"].mean()),
        "seconds": lambda group: f"{group['seconds'].mean():.0f}",
    }
    if "target_round" in runs:
        written |= {
            "rounds to target": lambda group: reached(group["target_round"], "{:.0f}".format),
            "bytes to target": lambda group: reached(group["target_bytes"], sized),
            "FLOPs to target": lambda group: reached(group["target_flops"], rough),
        }
    return written


def reached(values: pd.Series, write: Callable[[float], str]) -> str:
    """The median of what it took to reach a target, and how many runs did."""
    known = values.dropna()
    if known.empty:
        return "not reached"
    said = write(known.median())
    return said if len(known) == len(values) else f"{said} (in {len(known)} of {len(values)})"


def rough(number: float) -> str:
    """Three digits and a power of ten."""
    return f"{number:.2e}".replace("e+0", "e").replace("e+", "e")


def spread(values: pd.Series) -> str:
    """Mean ± standard deviation; of one value the value."""
    known = values.dropna()
    if known.empty:
        return "–"
    return f"{known.mean():.2f}" + (f" ± {known.std(ddof=1):.2f}" if len(known) > 1 else "")


def said_of(apart: Difference, scale: float) -> str:
    """A difference, its interval, and whether it is one."""
    if isnan(apart.mean):
        return "no seed in common"
    said = f"{apart.mean * scale:+.2f}"
    if apart.pairs > 1:
        said += f" ± {apart.half_width * scale:.2f}"
        said += "" if apart.separated else ", not separated"
    return said.replace("-", "−")


def sized(number: float) -> str:
    """Bytes with a unit of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _said_elsewhere(entry: Published) -> str:
    return f"{entry.mean:g}" + (f" ± {entry.std:g}" if entry.std is not None else "")
