"""Every example of docs/your_data.md runs, in their order: Python in one session, configurations from the command line."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import final_checkpoint

import lightning_fed.data
from lightning_fed.__main__ import main

PAGE = Path(__file__).parents[1] / "docs" / "your_data.md"
BLOCKS = re.findall(r"```(python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_has_an_example_of_each() -> None:
    named = {
        "ArrayFiles",
        "ByColumn",
        "CSVFiles",
        "HFDataset",
        "ImageFolder",
        "InMemory",
        "Instructions",
        "LazyInputs",
        "TableData",
    }
    named |= {"TextFiles"}
    text = "".join(code for _, code in BLOCKS)
    assert named <= {*lightning_fed.data.__all__}
    assert {name for name in named if name not in text} == set()


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    session: dict[str, Any] = {"__name__": "session"}
    clients = []
    for number, (language, code) in enumerate(BLOCKS):
        if language == "python":
            exec(compile(code, f"{PAGE.name}, example {number}", "exec"), session)
            continue
        Path("config.yaml").write_text(code)
        main(["fit", "--config", "config.yaml", "--trainer.accelerator=cpu", "--federation.progress=false"])
        _, identity, history, _, _ = final_checkpoint(Path(yaml.safe_load(code)["federation"]["run_dir"]) / "version_0")
        assert 0 <= history[-1]["after/test_accuracy/mean"] <= 1
        clients.append(identity["clients"])
    assert clients == [3, 3, 2, 4]
