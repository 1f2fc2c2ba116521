"""The table of methods with their results and costs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, isnan

import pandas as pd

from lightning_fed.experiments.report.comparison import Comparison, comparisons
from lightning_fed.experiments.report.gap_closed import gap_column
from lightning_fed.experiments.report.layout import BLANK, Column, Entry, Layout
from lightning_fed.experiments.report.pairing import best_group
from lightning_fed.experiments.report.runs import UNSEEN
from lightning_fed.experiments.report.statistics import CONFIDENCE, Estimate, holm
from lightning_fed.experiments.report.views import View, rough
from lightning_fed.experiments.sweep.plan import Published, ReportOptions
from lightning_fed.formatting import counted, sized

DEFAULT = ReportOptions()


def tables(runs: pd.DataFrame, options: ReportOptions = DEFAULT, published: Sequence[Published] = ()) -> list[Layout]:
    """A table per setting of the runs of :func:`.load_runs`, or of its CSV file, with published numbers beside the results; see
    :func:`.comparisons` for errors.
    """
    return [methods_table(comparison, published) for comparison in comparisons(runs, options)]


def methods_table(comparison: Comparison, published: Sequence[Published] = ()) -> Layout:
    """The results of a setting, a row per method. Arguments are those of :func:`tables`."""
    methods, measures, options = comparison.methods, comparison.measures, comparison.options
    theirs = {entry.method: entry for entry in published if entry.setting == comparison.setting}
    apart = comparison.differences(comparison.compared)
    columns = [Column("measured", lambda method: Entry(comparison.metrics[method]))] if comparison.mixed else []
    columns += [_measure_column(comparison, measure, called) for measure, called in measures.items()]
    if len(methods) > 1:
        columns.append(_difference_column(comparison, apart))
    for stage in UNSEEN:
        if (name := f"unseen_{stage}") in comparison.runs and comparison.runs[name].notna().any():
            columns.append(_measure_column(comparison, name, f"unseen, {stage.replace('_', ' ')}"))
    columns += [_cost_column(comparison, name, cost) for name, cost in _costs(comparison.runs).items()]
    if theirs:
        columns.append(Column("published", lambda method: Entry(_said_elsewhere(theirs[method])) if method in theirs else BLANK))
    notes = _notes(comparison, apart, theirs.values())
    if options.between:
        gap = gap_column(comparison, options.between)
        columns, notes = [*columns, gap[0]], [*notes, gap[1]]
    table = Layout.of(comparison.setting, {method: Entry(_called(comparison, method)) for method in methods}, columns, notes)
    majority = comparison.runs.groupby("partition")["majority"].mean() * comparison.scale  # global metrics have none
    if comparison.scale == 100.0 and majority.notna().any():
        numbers = [Entry("majority label"), *([BLANK] if comparison.mixed else []), Entry(spread(majority))]
        table.rows.append([*numbers, *[BLANK] * (len(table.columns) - len(numbers))])
    return table


def finding(comparison: Comparison) -> str:
    """The result of a setting in a sentence: the best method, and its difference to the baseline."""
    measure, where = comparison.compared, f"{comparison.setting}: " if comparison.setting else ""
    means = {method: values.mean() for method, values in comparison.values(measure).items() if method in comparison.alike}
    means = {method: mean for method, mean in means.items() if not isnan(mean)}
    if not means:
        return f"{where}no method has come to a number."
    first = (min if comparison.lower else max)(means, key=lambda method: means[method])
    values = spread(comparison.values(measure)[first] * comparison.scale, comparison.digits)
    unit = " %" if comparison.scale == 100.0 else ""
    what = f"{comparison.measures[measure]} of {comparison.metrics[first]}"
    said = f"{where}{_called(comparison, first)} is first with {values}{unit} ({what})"
    if (apart := comparison.differences(measure).get(first)) is None or isnan(apart.mean):
        return f"{said}."
    return f"{said}; that is {difference_text(apart, comparison.scale, comparison.digits)} beside {comparison.baseline}."


def _called(comparison: Comparison, method: str) -> str:
    """The name of a method, with its number of runs if others have more."""
    own, all_runs = len(comparison.methods[method]), len(comparison.runs.drop_duplicates(["partition", "seed"]))
    return method if own == all_runs else f"{method} ({own} of {all_runs} {'runs' if comparison.crossed else 'seeds'})"


def _measure_column(comparison: Comparison, measure: str, called: str) -> Column:
    values = comparison.values(measure)
    best = set[str]() if comparison.mixed or measure not in comparison.measures else best_group(values, comparison.lower)
    unit = " (%)" if comparison.scale == 100.0 else ""

    def entry(method: str) -> Entry:
        return Entry(spread(values[method] * comparison.scale, comparison.digits), method in best)

    return Column(f"{called}{unit}", entry)


def _cost_column(comparison: Comparison, name: str, cost: Callable[[pd.DataFrame], str]) -> Column:
    return Column(name, lambda method: Entry(cost(comparison.methods[method])))


def _difference_column(comparison: Comparison, apart: Mapping[str, Estimate]) -> Column:
    def entry(method: str) -> Entry:
        if method not in apart:
            return Entry("–" if method == comparison.baseline else "another measure")
        one, runs = apart[method], comparison.methods
        if runs[method].index.intersection(runs[comparison.baseline].index).empty:
            return Entry("no seed in common")
        own, shared = len(comparison.methods[method]), one.partitions * one.seeds
        draws = f"{shared} of {own} seeds"
        if comparison.crossed:
            draws = f"{counted(one.partitions, 'partition')} × {counted(one.seeds, 'training seed')}"
        note = f"Over the {draws} for which no run is missing." if 0 < shared < own else ""
        if one.partitions == 1 < len(comparison.partitions) and not isnan(one.error):
            note = f"{note} Valid for this partition alone.".lstrip()
        if comparison.crossed and one.seeds == 1 < min(one.partitions, len(comparison.seeds)):
            note = f"{note} It says nothing about other training seeds.".lstrip()
        return Entry(difference_text(one, comparison.scale, comparison.digits), note=note)

    return Column(f"{comparison.compared.replace('_', ' ')}, minus {comparison.baseline}", entry)


def _notes(comparison: Comparison, apart: Mapping[str, Estimate], theirs: Iterable[Published]) -> list[str]:
    """Notes that are needed to read the table."""
    runs, shown, options = comparison.runs, comparison.measures, comparison.options
    usual = runs["metric"].mode().iloc[0]
    others = {method: metric for method, metric in comparison.metrics.items() if metric != usual}
    what = ", ".join([usual, *(f"of {method} {metric}" for method, metric in others.items())])
    notes = [f"{what}: {_over(comparison)}."]
    lacking = [
        name for name in dict.fromkeys((options.baseline, *(options.between or ()))) if name and name not in comparison.methods
    ]
    notes += [f"No run of {name} is finished here." for name in lacking]
    if options.at not in shown:
        notes.append(f"No run has come to a number for: {View(options.at).called}.")
    if options.at == "best":
        notes.append(
            "Best measured round: the round of each run was chosen by this metric on the test data, as in the numbers that it is "
            "compared with; so it overestimates what a user would get."
        )
    if "selected" in shown:
        notes.append("Best on validation: at the round that is best on validation data.")
    if any(name.startswith("equal_") for name in shown):
        who = " that sends anything" if options.equal == "bytes" and not runs["bytes"].all() else ""
        notes.append(f"At equal cost: each run at the largest cost that every run of the setting{who} reached.{_short(comparison)}")
    if apart and len(runs) > len(comparison.methods):
        bold = [] if comparison.mixed else ["Bold: the best mean of a column and what is not separated from it."]
        notes += [_paired(comparison), *_corrected(apart), *bold]
    equal = dict.fromkeys(runs["equal_partitions"]) if "equal_partitions" in runs else ()
    notes += [f"Partitions {seeds} count as one: the partition's seed changes nothing in these data." for seeds in equal if seeds]
    if len(comparison.partitions) == 1:
        notes.append(f"All runs use partition {comparison.partitions[0]}; the results say nothing about other partitions.")
    made_with = [set(said.split(", ")) for said in dict.fromkeys(runs["made_with"]) if said] if "made_with" in runs else []
    if len(made_with) > 1:
        differing = sorted(set.union(*made_with) - set.intersection(*made_with))
        notes.append(f"The runs were not made with the same versions: {', '.join(differing)}.")
    if len(set(comparison.metrics.values())) == 1 and "monitor" in runs:
        others_monitored = runs[(runs["monitor"] != usual) & (runs["monitor"].fillna("") != "")]
        for monitor, group in others_monitored.groupby("monitor", sort=False):
            notes.append(f"The monitored metric of {', '.join(group['method'].unique())} is {monitor} (metric: monitor shows it).")
    sources = dict.fromkeys(entry.source for entry in theirs if entry.source)
    return notes + ([f"Published: {', '.join(sources)}."] if sources else [])


def _short(comparison: Comparison) -> str:
    """Which methods were measured well before the cost at which they are compared, because their next measurement is beyond it."""
    column = f"equal_{comparison.options.equal}_reached"
    if column not in comparison.runs:  # in files of earlier versions
        return ""
    least = comparison.runs.groupby("method", sort=False)[column].min()
    return "".join(f" {method} is measured at {share:.0%} of it or more." for method, share in least.items() if share < 0.9)


def _over(comparison: Comparison) -> str:
    """What means are computed over."""
    partitions, seeds = (", ".join(map(str, of)) for of in (comparison.partitions, comparison.seeds))
    if comparison.crossed:
        return f"mean ± standard deviation over partitions {partitions} × training seeds {seeds}"
    return f"mean ± standard deviation over seeds {seeds}" if len(comparison.seeds) > 1 else f"seed {seeds} alone"


def _paired(comparison: Comparison) -> str:
    """How differences are computed."""
    other, others = "a new partition", "new partitions"
    if comparison.same_clients:
        other, others = "a new split of the same clients' data", "new splits of the same clients' data"
    how = f"by seed, with Student's 95 % interval, valid for {other}"
    if len(comparison.partitions) == 1:
        how = "by training seed, with Student's 95 % interval, valid for this partition"
    elif comparison.crossed and len(comparison.seeds) == 1:
        how = f"by partition, with Student's 95 % interval, valid for {other} with this training seed"
    elif comparison.crossed:
        how = f"by partition and training seed, with a 95 % interval valid for {others} and training seeds"
    return f"Differences are paired {how}; not separated: 0 lies inside."


def _corrected(apart: Mapping[str, Estimate]) -> list[str]:
    """Which differences are separated after a correction for their number."""
    known = {method: one.p_value for method, one in apart.items() if not isnan(one.error)}
    if len(known) < 2:
        return []
    left = [method for method, p in zip(known, holm(list(known.values())), strict=True) if p < 1 - CONFIDENCE]
    return [f"Still separated after Holm's correction for {len(known)} differences: {'; '.join(left) or 'none'}."]


def _costs(runs: pd.DataFrame) -> dict[str, Callable[[pd.DataFrame], str]]:
    """How each cost is written, by its header."""
    written: dict[str, Callable[[pd.DataFrame], str]] = {
        "rounds × epochs": lambda group: f"{_range(group['rounds'])} × {group['epochs'].iloc[0] or '?'}",
        "bytes sent": lambda group: sized(group["bytes"].mean()),
        "training FLOPs": lambda group: rough(group["flops"].mean()),
    }
    if "server_flops" in runs and runs["server_flops"].any():  # missing in files of earlier versions
        written["server's FLOPs"] = lambda group: rough(group["server_flops"].mean())
    written["seconds"] = lambda group: f"{group['seconds'].mean():.0f}"
    if "target_round" in runs:
        written |= {
            "rounds to target": lambda group: reached(group["target_round"], "{:g}".format),
            "bytes to target": lambda group: reached(group["target_bytes"], sized),
            "FLOPs to target": lambda group: reached(group["target_flops"], rough),
        }
    return written


def _range(rounds: pd.Series) -> str:
    """The number of rounds of the runs, of which some may have ended early."""
    return "–".join(map(str, dict.fromkeys((rounds.min(), rounds.max()))))


def reached(values: pd.Series, write: Callable[[float], str]) -> str:
    """The median cost of reaching a target, and how many runs reached it."""
    known = values.dropna()
    if known.empty:
        return "not reached"
    said = write(known.median())
    return said if len(known) == len(values) else f"{said} (in {len(known)} of {len(values)})"


def spread(values: pd.Series, digits: int = 2) -> str:
    """Mean ± standard deviation; for one value the value. It says how many values there are if some are missing."""
    known = values.dropna()
    if known.empty:
        return "–"
    finite = len(known) > 1 and isfinite(known.mean())
    said = f"{known.mean():.{digits}f}" + (f" ± {known.std(ddof=1):.{digits}f}" if finite else "")
    said = said.replace("-", "−")
    return said if len(known) == len(values) else f"{said} ({len(known)} of {len(values)})"


def difference_text(apart: Estimate, scale: float, digits: int = 2) -> str:
    """A difference, its interval, and whether it is separated from 0."""
    if isnan(apart.mean):
        return "no number"
    said = f"{apart.mean * scale:+.{digits}f}"
    if not isnan(apart.error):
        said += f" ± {apart.half_width * scale:.{digits}f}"
        said += "" if apart.separated else ", not separated"
    return said.replace("-", "−")


def _said_elsewhere(entry: Published) -> str:
    numbers = [entry.mean] if entry.std is None else [entry.mean, entry.std]
    places = max(len(f"{number:g}".partition(".")[2]) for number in numbers)  # YAML has 78.10 as 78.1
    return " ± ".join(f"{number:.{places}f}" for number in numbers)
