"""Data of hospitals: from files that are made here, in the form of the originals; and the originals, where they are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_files import REAL, real
from tiny_hospitals import SIZES, heart_files
from torch import Tensor

from lightning_fed.data import IID, TCGABRCA, HeartDisease
from lightning_fed.data.tabular.hospitals import Hospitals, held_out
from lightning_fed.data.tabular.scaled import ScaledColumns
from lightning_fed.errors import FederationError


def rows_of(data: Hospitals, client: int, part: int) -> tuple[Tensor, Tensor]:
    own = data.client(client)
    return own.data[own.splits[part]]  # type: ignore[return-value]


def test_each_hospital_is_a_client_and_who_has_a_gap_is_left_out(tmp_path: Path) -> None:
    data = HeartDisease(heart_files(tmp_path))
    assert [client.num_train + client.num_test for client in data.clients] == [size - 1 for size in SIZES.values()]
    assert data.client_names == ["Cleveland", "Hungary", "Switzerland", "Long Beach"]
    assert (data.num_classes, data.problem) == (1, "binary")
    assert data.clients[2].label_counts[0] == 0
    assert {client.num_val for client in data.clients} == {0}


def test_columns_are_numbers_then_one_hot_categories_without_the_first(tmp_path: Path) -> None:
    data = HeartDisease(heart_files(tmp_path), standardize="none")
    fields, sick = rows_of(data, 0, 0)
    expected = {}
    for line in (tmp_path / "processed.cleveland.data").read_text().split()[:-1]:
        own = [0.0 if field == "?" else float(field) for field in line.split(",")]
        one_hot = [*(own[2] == pain for pain in (2, 3, 4)), *(own[6] == ecg for ecg in (1, 2))]
        expected[*(own[k] for k in (0, 1, 3, 4, 5, 7, 8, 9)), *one_hot] = own[13] > 0
    assert fields.shape[1] == 13
    assert all(expected[tuple(row)] == label for row, label in zip(fields.tolist(), sick.tolist(), strict=True))


@pytest.mark.parametrize("scope", ["client", "all"])
def test_scales_are_those_of_training_rows_alone(tmp_path: Path, scope: Any) -> None:
    raw, data = HeartDisease(heart_files(tmp_path), standardize="none"), HeartDisease(str(tmp_path), standardize=scope)
    everybody = torch.cat([rows_of(raw, client, 0)[0] for client in range(4)])
    for client in range(4):
        train = rows_of(raw, client, 0)[0] if scope == "client" else everybody
        std = train.std(dim=0)
        for part in (0, 2):
            expected = (rows_of(raw, client, part)[0] - train.mean(dim=0)) / torch.where(std > 0, std, 1.0)
            assert torch.allclose(rows_of(data, client, part)[0], expected, atol=1e-5)
    pooled = data.pooled()
    assert torch.allclose(pooled.data[pooled.splits[0]][0].mean(dim=0), torch.zeros(13), atol=1e-5)  # type: ignore[union-attr]


def test_shared_examples_have_no_one_scale() -> None:
    class Shared(ScaledColumns):
        num_classes = 2

        def load(self) -> Any:
            x = torch.arange(40.0).reshape(20, 2)
            return x, torch.arange(20) % 2, x, torch.arange(20) % 2

    class Everything(IID):
        def __call__(self, labels: Any, num_clients: int, seed: int) -> Any:
            return [np.arange(len(labels))] * num_clients

    data = Shared("client", num_clients=2, partition=Everything(), split="official", val_share=0.0)
    with pytest.raises(FederationError, match="set standardize to all or none"):
        data.setup()


def test_the_split_is_stratified_unless_a_class_is_too_small() -> None:
    sick = np.array([True] * 10 + [False] * 20)
    assert (sick[held_out(sick)].sum(), held_out(sick).sum()) == (4, 11)
    assert held_out(np.array([True] * 20 + [False] * 2)).sum() == 8


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["1,2,3"], "processed.va.data, line 1, has 3 columns, expected 14"),
        (
            ["50,1,2,120,200,0,1,150,0,1,?,?,?,0", "50,1,2,120,high,0,1,150,0,1,?,?,?,0"],
            "line 2, has 'high' in the column 'cholesterol'",
        ),
        (["50,1,7,120,200,0,1,150,0,1,?,?,?,0"], "line 1, has '7' in the column 'chest pain', expected one of 1, 2, 3, 4"),
        (["50,1,?,120,200,0,1,150,0,1,?,?,?,0"], "has no patient without a missing value"),
    ],
)
def test_files_that_are_not_the_originals_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(FederationError, match=message):
        HeartDisease(heart_files(tmp_path, va=lines)).setup()


def test_missing_files_are_named_with_their_source(tmp_path: Path) -> None:
    heart_files(tmp_path)
    (tmp_path / "processed.va.data").unlink()
    for data, name, source in (
        (HeartDisease(str(tmp_path)), "processed.va.data", "archive.ics.uci.edu/dataset/45"),
        (TCGABRCA(str(tmp_path)), "brca.csv", "github.com/owkin/FLamby"),
    ):
        with pytest.raises(FederationError, match=f"Found no {re.escape(name)} in .*{source}.*set --data.init_args.root"):
            data.setup()


def tcga_files(folder: Path, second: str = "1") -> str:
    header = "pid,age_at_index,race_white,E,T\n"
    patients = [f"p{k},{50 + k},{second if k == 1 else k % 2},{k % 2},{10 * k}\n" for k in range(20)]
    (folder / "brca.csv").write_text(header + "".join(patients))
    parts = [f"p{k},-,{'test' if k % 3 == 0 else 'train'}_{k % 6}\n" for k in range(18)]
    parts[6] = "p6,-,train_0\n"
    parts[9] = "p9,-,train_3\n"
    for k in (1, 2, 4, 5):
        parts[k] = f"p{k},-,test_{k}\n"
    (folder / "train_test_split.csv").write_text("pid,fold,fold2\n" + "".join(parts))
    return str(folder)


def test_regions_and_their_patients_are_those_of_the_split(tmp_path: Path) -> None:
    data = TCGABRCA(tcga_files(tmp_path))
    data.setup()
    assert data.client_names == ["Northeast", "South", "West", "Midwest", "Europe", "Canada"]
    assert sum(client.num_train + client.num_test for client in data.clients) == 18
    rows, targets = rows_of(data, 1, 2)
    assert (rows.tolist(), targets.tolist()) == ([[51.0, 1.0]], [[1.0, 10.0]])
    assert data.clients[1].label_counts == (0, 2)  # patients 7 and 13 died


def test_a_table_that_is_not_the_original_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="line 3, has nothing in the column 'race_white'"):
        TCGABRCA(tcga_files(tmp_path, "")).setup()
    with pytest.raises(FederationError, match="line 3, has 'x' in the column 'race_white'"):
        TCGABRCA(tcga_files(tmp_path, "x")).setup()
    (tmp_path / "train_test_split.csv").write_text("pid,fold,fold2\np1,-,train_7\n")
    with pytest.raises(FederationError, match="line 2, has 'train_7' in the column 'fold2', expected train_0 to test_5"):
        TCGABRCA(str(tmp_path)).setup()


@real
def test_the_heart_patients_are_flambys() -> None:
    data = HeartDisease(f"{REAL}/heart_disease")
    assert [(c.num_train, c.num_test, c.label_counts[1]) for c in data.clients] == [
        (199, 104, 91),
        (172, 89, 65),
        (30, 16, 30),
        (85, 45, 66),
    ]
    majority = data.majority_accuracy()
    assert majority is not None
    assert majority.tolist() == pytest.approx([0.538, 0.629, 0.938, 0.778], abs=5e-4)
    for client in range(4):
        rows, _ = rows_of(data, client, 0)
        assert torch.allclose(rows.mean(dim=0), torch.zeros(13), atol=1e-5)
        assert [round(value, 4) for value in rows.std(dim=0).tolist()] == [
            0.0 if client == 2 and k == 3 else 1.0 for k in range(13)
        ]


@real
def test_the_breast_cancer_patients_are_flambys() -> None:
    data = TCGABRCA(f"{REAL}/tcga_brca")
    assert [(c.num_train, c.num_test, c.label_counts[1]) for c in data.clients] == [
        (248, 63, 45),
        (156, 40, 35),
        (164, 42, 14),
        (129, 33, 16),
        (129, 33, 7),
        (40, 11, 2),
    ]
    assert rows_of(data, 0, 0)[0].shape[1] == 39
