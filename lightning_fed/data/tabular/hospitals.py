"""Two hospital datasets, with the clients and the split of FLamby (du Terrail et al., NeurIPS 2022)."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fed.data.batches import INPUT, TARGETS
from lightning_fed.data.checked import pick_column
from lightning_fed.data.federated import Pools, pools_of
from lightning_fed.data.lines import csv_rows, csv_table
from lightning_fed.data.partition.base import Partitioner
from lightning_fed.data.partition.natural import ByColumn
from lightning_fed.data.tabular.scaled import ScaledColumns, Scope
from lightning_fed.errors import FederationError, require
from lightning_fed.options import ClosedUnitInterval

SITE = "site"
"""The column of a patient's site."""


class Hospitals(ScaledColumns):
    """Common part of both datasets: each site is a client, in FLamby's order, and the training and test sets are given.

    Args:
        root: folder with the original files.
        standardize: see :class:`ScaledColumns`.
        partition: None: each site is a client.
        split: see :class:`FederatedDataModule`; ``official`` is FLamby's.
        val_share: see :class:`FederatedDataModule`; FLamby holds out no validation examples.
        **kwargs: see :class:`FederatedDataModule`.
    """

    num_classes = 1
    num_labels = 2
    sites: Sequence[str]
    """Names of the sites, in the order of their ids."""

    published: str
    """Where to get the files, for errors."""

    def __init__(
        self,
        root: str,
        standardize: Scope,
        partition: Partitioner | None = None,
        split: Literal["pooled", "official"] = "official",
        val_share: ClosedUnitInterval = 0.0,
        **kwargs: Any,
    ) -> None:
        partition = ByColumn(SITE) if partition is None else partition
        super().__init__(standardize, partition=partition, split=split, val_share=val_share, **kwargs)
        self.root = root
        self._sites = np.arange(0)  # the site of each patient, those of the training set first

    def _set_up(self) -> None:
        super()._set_up()
        if self.partition == ByColumn(SITE) and self.client_names is not None:
            self.client_names = [self.sites[int(name)] if name.isdecimal() else name for name in self.client_names]

    def column(self, name: str) -> NDArray[Any]:
        return pick_column(type(self).__name__, {SITE: self._sites}, name)

    def file(self, name: str) -> Path:
        """An existing file; otherwise an error says where to get it and where to put it."""
        path = Path(self.root).expanduser() / name
        require(
            path.is_file(),
            f"Found no {name} in {path.parent.absolute()}: get {self.published}, and set --data.init_args.root to the folder with "
            "it.",
        )
        return path

    def pools(self, rows: NDArray[np.float32], labels: NDArray[Any], sites: NDArray[Any], test: NDArray[Any], **more: Any) -> Pools:
        """The return value of :meth:`load`, from patients in any order.

        Args:
            rows: (N, columns).
            labels: (N,), 0 or 1.
            sites: (N,), numbers.
            test: which patients are for test, (N,), boolean.
            **more: other inputs by name, each with a row per patient.
        """
        order = np.concatenate([np.flatnonzero(~test), np.flatnonzero(test)])
        self._sites = sites[order]
        inputs = {name: torch.from_numpy(np.ascontiguousarray(values[order])) for name, values in ({INPUT: rows} | more).items()}
        return pools_of(inputs, torch.from_numpy(labels[order]).long(), int((~test).sum()))


FILES = ("cleveland", "hungarian", "switzerland", "va")
DIAGNOSIS, GAPPY, CATEGORICAL = 13, (10, 11, 12), {2: (1, 2, 3, 4), 6: (0, 1, 2)}
"""The target column, the columns that are mostly missing, and the categorical columns with their values."""

HEART_COLUMNS = (
    *("age", "sex", "chest pain", "resting blood pressure", "cholesterol", "fasting sugar", "resting ECG", "highest heart rate"),
    *("angina from exercise", "ST depression", "its slope", "vessels", "thal", "diagnosis"),
)


class HeartDisease(Hospitals):
    """Heart disease, yes or no. UCI Heart Disease (Janosi et al., 1988), 740 patients of 4 hospitals, prepared and divided as
    FLamby's Fed-Heart-Disease.

    The columns slope, vessels and thal are left out, then patients with a missing value. There are 13 inputs: age, sex, resting
    blood pressure, cholesterol, fasting sugar, highest heart rate, angina from exercise and ST depression, and one-hot chest pain
    (2 to 4) and resting ECG (1, 2), without their first values. 486 patients are for training and 254 for test (Cleveland 199 and
    104, Hungary 172 and 89, Switzerland 30 and 16, Long Beach 85 and 45): two thirds of each hospital, drawn with seed 43,
    independent of the run's seed.

    Args:
        root: folder with ``processed.cleveland.data``, ``processed.hungarian.data``, ``processed.switzerland.data`` and
            ``processed.va.data``, from the UCI Machine Learning Repository.
        standardize: see :class:`ScaledColumns`; FLamby's is ``client``.
        **kwargs: see :class:`FederatedDataModule`. By default each hospital is a client, and its test part is FLamby's
            (``split: official``).
    """

    problem = "binary"
    class_names = ("healthy", "sick")
    sites = ("Cleveland", "Hungary", "Switzerland", "Long Beach")
    published = (
        "the four processed files of data set 45, Heart Disease, at https://archive.ics.uci.edu/dataset/45/heart+disease (name the "
        "authors: CC BY 4.0)"
    )

    def __init__(self, root: str, standardize: Scope = "client", **kwargs: Any) -> None:
        super().__init__(root, standardize, **kwargs)

    def load(self) -> Pools:
        """The patients, with whether they are sick."""
        hospitals = [complete_patients(self.file(f"processed.{name}.data")) for name in FILES]
        patients = np.concatenate(hospitals)
        sites = np.repeat(np.arange(len(FILES)), [len(hospital) for hospital in hospitals])
        sick = patients[:, DIAGNOSIS] > 0
        numbers = [place for place in range(DIAGNOSIS) if place not in (*GAPPY, *CATEGORICAL)]
        one_hot = [patients[:, place] == value for place, values in CATEGORICAL.items() for value in values[1:]]
        rows = np.column_stack([patients[:, numbers], *one_hot]).astype(np.float32)
        test = np.concatenate([held_out(sick[sites == site]) for site in range(len(FILES))])
        return self.pools(rows, sick, sites, test)


def complete_patients(path: Path) -> NDArray[np.float64]:
    """The lines of a processed file without a missing value in the columns that are used, shape (N, 14)."""
    patients = []
    for line, fields in csv_rows(path):
        where = f"{path}, line {line},"
        require(len(fields) == len(HEART_COLUMNS), f"{where} has {len(fields)} columns, expected {len(HEART_COLUMNS)}.")
        used = [math.nan if place in GAPPY else number_of(field, where, HEART_COLUMNS[place]) for place, field in enumerate(fields)]
        if not any(math.isnan(value) for place, value in enumerate(used) if place not in GAPPY):
            for place, values in CATEGORICAL.items():
                known = ", ".join(map(str, values))
                require(
                    used[place] in values,
                    f"{where} has {fields[place]!r} in the column {HEART_COLUMNS[place]!r}, expected one of {known}.",
                )
            patients.append(used)
    require(len(patients) > 0, f"{path} has no patient without a missing value: get the original file.")
    return np.array(patients)


def held_out(sick: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """FLamby's test patients of a hospital: a third, stratified if there are more than two of both kinds."""
    from sklearn.model_selection import train_test_split  # takes half a second

    counts = np.unique(sick, return_counts=True)[1]
    stratified = len(counts) > 1 and counts.min() > 2
    _, test = train_test_split(
        np.arange(len(sick)), test_size=1 - 0.66, train_size=0.66, random_state=43, stratify=sick if stratified else None
    )
    return np.isin(np.arange(len(sick)), test)


class TCGABRCA(Hospitals):
    """Survival time of patients. The clinical table of TCGA-BRCA, breast cancer (Liu et al., Cell 2018), as in FLamby's
    Fed-TCGA-BRCA: 1,088 patients of 6 regions, 39 features, days until death or last contact.

    866 patients are for training and 222 for test (Northeast 248 and 63, South 156 and 40, West 164 and 42, Midwest 129 and 33,
    Europe 129 and 33, Canada 40 and 11), by the published split; 8 patients that it does not name are not used. The labels for
    partitions are whether patients died.

    Args:
        root: folder with ``brca.csv`` and ``train_test_split.csv``.
        standardize: see :class:`ScaledColumns`. FLamby's is ``none``: age in years is used beside 38 columns of 0 and 1, with which
            plain SGD at FLamby's rates oscillates.
        **kwargs: see :class:`FederatedDataModule`. By default each region is a client, and its test part is FLamby's
            (``split: official``).
    """

    problem = "survival"
    predicts_labels = False
    class_names = ("censored", "died")
    sites = ("Northeast", "South", "West", "Midwest", "Europe", "Canada")
    published = (
        "brca.csv and train_test_split.csv of https://github.com/owkin/FLamby (flamby/datasets/fed_tcga_brca, the second in its "
        "dataset_creation_scripts)"
    )

    def __init__(self, root: str, standardize: Scope = "none", **kwargs: Any) -> None:
        super().__init__(root, standardize, **kwargs)
        self._features: list[str] = []  # names of the columns

    def load(self) -> Pools:
        """The patients, with event and time."""
        path, split = self.file("brca.csv"), self.file("train_test_split.csv")
        parts = {}
        for where, (patient, part) in csv_table(split, needed=("pid", "fold2"))[1]:
            kind, _, site = part.partition("_")
            require(
                kind in ("train", "test") and site in map(str, range(len(self.sites))),
                f"{where} has {part!r:.60} in the column 'fold2', expected train_0 to test_{len(self.sites) - 1}.",
            )
            parts[patient] = kind == "test", int(site)
        columns = csv_table(path)[0]
        features = [name for name in columns if name not in ("pid", "E", "T")]
        numbers, given = [], []
        for where, (patient, *fields) in csv_table(path, needed=("pid", *features, "E", "T"))[1]:
            if patient in parts:
                named = zip((*features, "E", "T"), fields, strict=True)
                numbers.append([complete(number_of(field, where, name), where, name) for name, field in named])
                given.append(parts[patient])
        require(
            len(given) == len(parts),
            f"{path} has {len(given)} of the {len(parts)} patients that {split.name} names: get the original files.",
        )
        patients, (test, sites) = np.array(numbers, dtype=np.float32), np.array(given).T
        targets = patients[:, -2:]
        self._features = features
        return self.pools(patients[:, :-2], targets[:, 0] > 0, sites, test.astype(bool), **{TARGETS: targets})

    def column_title(self, place: int) -> str:
        return self._features[place]


def number_of(field: str, where: str, column: str) -> float:
    """A number; NaN if it is missing, for which UCI's files have a question mark."""
    if field.strip() in ("?", ""):
        return math.nan
    try:
        value = float(field)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise FederationError(f"{where} has {field!r:.60} in the column {column!r}, which is not a number: get the original file.")
    return value


def complete(value: float, where: str, column: str) -> float:
    """A number that must not be missing."""
    require(not math.isnan(value), f"{where} has nothing in the column {column!r}: get the original file.")
    return value
