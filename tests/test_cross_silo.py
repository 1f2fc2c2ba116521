"""The examples of docs/cross_silo.md run, in their order, and the sweeps of FLamby's tables parse."""

import re
from pathlib import Path

import yaml
from tiny import final_checkpoint

from lightning_fed.__main__ import main

PAGE = Path(__file__).parents[1] / "docs" / "cross_silo.md"


def test_from_files_of_clinics_to_a_table() -> None:
    [files, *_], [config, sweep] = (re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL) for kind in ("python", "yaml"))
    exec(compile(files, PAGE.name, "exec"), {})
    Path("clinics.yaml").write_text(config)
    main(["fit", "--config", "clinics.yaml", "--trainer.accelerator=cpu", "--federation.progress=false"])
    _, identity, history, _, _ = final_checkpoint(Path("runs/clinics/version_0"))
    assert identity["clients"] == 3
    assert history[-1]["after/test_accuracy/mean"] > 0.5
    Path("sweep.yaml").write_text(sweep)
    assert {*yaml.safe_load(sweep)["methods"]} == {"FedAvg", "FedAdam", "local", "pooled"}
    main(["sweep", "--config", "sweep.yaml", "--dry_run"])
