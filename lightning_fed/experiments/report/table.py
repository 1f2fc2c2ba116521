"""The table of a comparison: methods down, what they reached and cost across."""

from collections.abc import Callable, Iterable, Sequence
from math import isnan

import pandas as pd

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.comparison import Difference, best_group, difference
from lightning_fed.experiments.report.gap_closed import with_room
from lightning_fed.experiments.report.layout import Entry, Layout
from lightning_fed.experiments.report.views import Cost, View, in_percent, lower_is_better, stage_of
from lightning_fed.experiments.sweep.plan import Published
from lightning_fed.formatting import sized

BLANK = Entry("")


def tables(
    runs: pd.DataFrame,
    baseline: str | None = None,
    pooled: bool = False,
    published: Sequence[Published] = (),
    at: str = "last",
    equal: Cost | None = None,
    room: Sequence[str] | None = None,
) -> list[Layout]:
    """A table per setting.

    Args:
        runs: as :func:`.load_runs` gives them, or its CSV file. Runs that are not finished are left out.
        baseline: the method that differences are to; None: the clients alone (``Standalone``) if they are there, else the first.
        pooled: also show the accuracy over all clients' examples together.
        published: numbers of others, shown beside ours.
        at: which round is reported; see :class:`.View`. The last round and, if there is one, that which is best on validation data
            stand beside it.
        equal: compare at equal cost, which the runs must have been loaded with; see :func:`.load_runs`.
        room: two methods, the lower and the upper reference between which the others stand; None: no such column.

    Raises:
        FederationError: if there is no such baseline, no finished run, or if the runs were loaded without what is to be shown.
    """
    finished = runs[runs["rounds"] >= runs["planned"]]
    if finished.empty:
        raise FederationError(f"None of the {len(runs)} runs is finished: play them to their last round first.")
    for option, value, column in (("at", View(at).at, at), ("equal", equal, f"equal_{equal}")):
        if value is not None and column not in runs:
            raise FederationError(f"The table of runs has no column {column}: write it with {option} {value}.")
    shown = []
    for setting, group in finished.groupby("setting", sort=False):
        theirs = [entry for entry in published if entry.setting == setting]
        layout = _table(group, str(setting), baseline, pooled, theirs, View(at), equal)
        shown.append(with_room(layout, group, room, f"equal_{equal}" if equal else at) if room else layout)
    return shown


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


def _table(
    runs: pd.DataFrame,
    setting: str,
    baseline: str | None,
    pooled: bool,
    published: Sequence[Published],
    view: View,
    equal: Cost | None,
) -> Layout:
    metrics, reference = list(runs["metric"].unique()), baseline_of(runs, baseline)
    scale, unit = (100.0, " (%)") if all(map(in_percent, metrics)) else (1.0, "")
    by_method = {str(method): group.set_index("seed") for method, group in runs.groupby("method", sort=False)}
    headers = _headers(runs, view, equal, pooled)
    mixed = len({stage_of(metric) for metric in metrics}) > 1
    values = {name: {method: group[name] for method, group in by_method.items()} for name in headers}
    # files of earlier versions do not say
    lower = bool(runs["lower_is_better"].any()) if "lower_is_better" in runs else lower_is_better(metrics[0])
    best = {name: set[str]() if mixed else best_group(of, lower) for name, of in values.items()}
    compared = next(iter(headers))
    theirs_by = by_method[reference]
    apart = {
        method: difference(group[compared], theirs_by[compared])
        for method, group in by_method.items()
        if method != reference and stage_of(group["metric"].iloc[0]) == stage_of(theirs_by["metric"].iloc[0])
    }
    seeds = sorted(runs["seed"].unique())
    costs = _costs(runs)
    theirs = {entry.method: entry for entry in published}

    rows = []
    for method, group in by_method.items():
        name = method if len(group) == len(seeds) else f"{method} ({len(group)} of {len(seeds)} seeds)"
        row = [Entry(name), *([Entry(str(group["metric"].iloc[0]))] if mixed else [])]
        row += [Entry(spread(group[view] * scale), method in best[view]) for view in headers]
        if len(by_method) > 1:
            other = "–" if method == reference else "another measure"
            row.append(Entry(difference_text(apart[method], scale) if method in apart else other))
        row += [Entry(cost(group)) for cost in costs.values()]
        if theirs:
            row.append(Entry(_said_elsewhere(theirs[method])) if method in theirs else BLANK)
        rows.append(row)
    columns = [*(["measured"] if mixed else []), *(f"{said}{unit}" for said in headers.values())]
    columns += [f"{compared.replace('_', ' ')}, minus {reference}"] if len(by_method) > 1 else []
    columns += [*costs, *(["published"] if theirs else [])]
    majority = runs.drop_duplicates("seed")["majority"] * scale
    if scale == 100.0 and majority.notna().any():
        numbers = [Entry("majority label"), *([BLANK] if mixed else []), Entry(spread(majority))]
        rows.append([*numbers, *[BLANK] * (len(columns) + 1 - len(numbers))])
    notes = _notes(runs, seeds, list(headers), view, len(by_method) > 1 and bool(apart), theirs.values())
    return Layout(setting, ["", *columns], rows, notes)


def _headers(runs: pd.DataFrame, view: View, equal: Cost | None, pooled: bool) -> dict[str, str]:
    """The columns of accuracies: where they are in the runs, and how they are called. The first is what is compared."""
    headers = {}
    if equal is not None:
        called = {"rounds": "rounds", "bytes": "bytes sent", "flops": "training FLOPs"}[equal]
        budget = runs[f"equal_{equal}_budget"].iloc[0]
        spent = {"rounds": f"{budget:.0f}", "bytes": sized(budget), "flops": rough(budget)}[equal]
        headers[f"equal_{equal}"] = f"at equal {called} ({spent})" + ("" if view.at == "last" else f", {view.called}")
    headers |= {name: View(name).called for name in dict.fromkeys((view.at, "last", "selected"))}
    of_clients = {"worst_tenth": "worst tenth of clients"} | ({"pooled": "pooled"} if pooled else {})
    ended = "" if next(iter(headers)) == "last" else ", last round"
    headers |= {name: f"{called}{ended}" for name, called in of_clients.items()}
    return {name: called for name, called in headers.items() if runs[name].notna().any()}


def _notes(
    runs: pd.DataFrame, seeds: Sequence[int], shown: Sequence[str], view: View, differences: bool, theirs: Iterable[Published]
) -> list[str]:
    """What must be known to read the table."""
    metrics = list(runs["metric"].unique())
    listed, several = ", ".join(map(str, seeds)), len(seeds) > 1
    usual = runs["metric"].mode().iloc[0]
    others = {str(m): str(group["metric"].iloc[0]) for m, group in runs[runs["metric"] != usual].groupby("method", sort=False)}
    what = ", ".join([usual, *(f"of {method} {metric}" for method, metric in others.items())])
    notes = [f"{what}: {f'mean ± standard deviation over seeds {listed}' if several else f'seed {listed} alone'}."]
    if view.at == "best":
        notes.append(
            "Best measured round: the round of each run was chosen by its accuracy on the test data, as in the numbers that it is "
            "compared with; it is too high for what a user would get."
        )
    if "selected" in shown:
        notes.append("Best on validation: at the round that is best on validation data.")
    if any(name.startswith("equal_") for name in shown):
        notes.append("At equal cost: what each run had reached when it had spent no more than all of them have.")
    if differences and several:
        notes.append(
            "Differences are paired by seed, with Student's 95 % interval; not separated: 0 lies inside. Bold: the best mean of a "
            "column and what is not separated from it."
        )
    if len(metrics) == 1 and "monitor" in runs:
        apart = runs[(runs["monitor"] != metrics[0]) & (runs["monitor"].fillna("") != "")]
        for monitor, group in apart.groupby("monitor", sort=False):
            notes.append(f"The monitored metric of {', '.join(group['method'].unique())} is {monitor} (metric: monitor shows it).")
    sources = dict.fromkeys(entry.source for entry in theirs if entry.source)
    return notes + ([f"Published: {', '.join(sources)}."] if sources else [])


def _costs(runs: pd.DataFrame) -> dict[str, Callable[[pd.DataFrame], str]]:
    """How each cost is written, by its header."""
    written: dict[str, Callable[[pd.DataFrame], str]] = {
        "rounds × epochs": lambda group: f"{group['rounds'].iloc[0]} × {group['epochs'].iloc[0] or '?'}",
        "bytes sent": lambda group: sized(group["bytes"].mean()),
        "training FLOPs": lambda group: rough(group["flops"].mean()),
    }
    if "server_flops" in runs and runs["server_flops"].any():  # files of earlier versions do not have it
        written["server's FLOPs"] = lambda group: rough(group["server_flops"].mean())
    written["seconds"] = lambda group: f"{group['seconds'].mean():.0f}"
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
    """Three digits and a power of ten; nothing is 0."""
    if not number:
        return "0"
    return f"{number:.2e}".replace("e+0", "e").replace("e+", "e")


def spread(values: pd.Series) -> str:
    """Mean ± standard deviation; of one value the value."""
    known = values.dropna()
    if known.empty:
        return "–"
    return f"{known.mean():.2f}" + (f" ± {known.std(ddof=1):.2f}" if len(known) > 1 else "")


def difference_text(apart: Difference, scale: float) -> str:
    """A difference, its interval, and whether it is one."""
    if isnan(apart.mean):
        return "no seed in common"
    said = f"{apart.mean * scale:+.2f}"
    if apart.pairs > 1:
        said += f" ± {apart.half_width * scale:.2f}"
        said += "" if apart.separated else ", not separated"
    return said.replace("-", "−")


def _said_elsewhere(entry: Published) -> str:
    numbers = [entry.mean] if entry.std is None else [entry.mean, entry.std]
    places = max(len(f"{number:g}".partition(".")[2]) for number in numbers)  # YAML has 78.10 as 78.1
    return " ± ".join(f"{number:.{places}f}" for number in numbers)
