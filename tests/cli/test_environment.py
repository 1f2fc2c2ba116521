"""Options out of the environment: said, recorded, outranked, and known."""

from pathlib import Path

import pytest
import yaml
from tiny_commands import refused

from lightning_fed.__main__ import main

ROUNDS, TARGET = "LIGHTNING_FED_FIT__FEDERATION__ROUNDS", "LIGHTNING_FED_FIT__FEDERATION__TARGET"


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, object], str]:
    with pytest.raises(SystemExit) as error:
        main(["fit", *args, "--print_config"])
    said = capsys.readouterr()
    assert error.value.code == 0, said.err
    return yaml.safe_load(said.out)["federation"], said.err


def test_they_are_said_and_files_and_flags_outrank_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ROUNDS, "7")
    monkeypatch.setenv(TARGET, "0.5")
    Path("own.yaml").write_text("data: {class_path: Digits}\nmodel: {class_path: FedAvg, init_args: {backbone: CNN5}}\n")
    federation, said = printed(capsys, "--config", "own.yaml")
    assert (federation["rounds"], federation["target"]) == (7, 0.5)
    assert f"federation.rounds is 7 unless set otherwise ({ROUNDS})." in said
    assert printed(capsys, "--config", "quickstart")[0]["rounds"] == 30
    assert printed(capsys, "--config", "own.yaml", "--federation.rounds=2")[0]["rounds"] == 2


def test_a_run_records_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TARGET, "0.25")
    small = ["--data.init_args.num_clients=2", "--trainer.limit_train_batches=1", "--federation.progress=false"]
    main(["fit", "--config", "quickstart", "--federation.rounds=1", "--federation.logger=false", *small])
    assert yaml.safe_load(Path("runs/quickstart/version_0/config.yaml").read_text())["federation"]["target"] == 0.25


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("LIGHTNING_FED_FIT__FEDERATION__ROUND", "unset it"),
        ("LIGHTNING_FED_FIT__MODEL__MU", "or give LIGHTNING_FED_FIT__MODEL a YAML file"),
    ],
)
def test_one_that_would_do_nothing_is_refused(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    message = refused(capsys, "fit", "--config", "quickstart", "--print_config")
    assert message.startswith(f"lightning-fed: error: {name} is set, but fit has no such option")
    assert remedy in message


def test_a_configuration_of_all_verbs_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LIGHTNING_FED_CONFIG", "quickstart")
    assert "or set LIGHTNING_FED_FIT__CONFIG" in refused(capsys, "fit", "--config", "quickstart")


def test_those_of_another_verb_are_left_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LIGHTNING_FED_TEST__FEDERATION__ROUNDS", "7")
    federation, said = printed(capsys, "--config", "quickstart")
    assert (federation["rounds"], said) == (30, "")
