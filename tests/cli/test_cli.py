"""The command line, called as a function: what it prints, writes and refuses."""

import errno
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from tiny import final_checkpoint
from tiny_commands import printed, refused

from lightning_fed.__main__ import how_to_continue, main
from lightning_fed.experiments.sweep.sweep_file import read_sweep
from lightning_fed.methods import __all__ as methods
from lightning_fed.system.signals import Preempted

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART, FIVE_NETWORKS = str(CONFIGS / "quickstart.yaml"), str(CONFIGS / "pfedlora" / "digits.yaml")
CONFIG = """
data:
  class_path: Digits
  init_args:
    num_clients: 3
    partition: {class_path: ClassesPerClient, init_args: {classes: 2}}
    batch_size: 32
    eval_batch_size: 32
model:
  class_path: PFedLoRA
  init_args: {backbone: CNN5}
federation: {rounds: 2, participation: 0.7, progress: false, logger: false}
trainer: {accelerator: cpu, limit_train_batches: 2, limit_val_batches: 1, limit_test_batches: 1}
"""


@pytest.fixture(autouse=True)
def config() -> None:
    Path("config.yaml").write_text(CONFIG)


def fit(*args: str) -> None:
    main(["fit", "--config", "config.yaml", *args])


def test_a_path_that_cannot_be_read_is_named_in_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(capsys, "fit", "--config", "x" * 300).endswith("x: File name too long.\n")
    denied = PermissionError(errno.EACCES, "Permission denied", "/another/user's/config.yaml")
    monkeypatch.setattr("lightning_fed.experiments.configs.shipped", Mock(side_effect=denied))
    assert "/another/user's/config.yaml: Permission denied." in refused(capsys, "fit", "--config", "theirs")


# ----------------------------------------------------------------------------------------------------------------- help


def test_help_is_fast_because_it_waits_for_nothing() -> None:
    code = "import sys; from lightning_fed.__main__ import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "lightning-fed fit --config quickstart" in done.stdout
    assert all(verb in done.stdout for verb in ("fit", "validate", "test"))


def test_what_cannot_be_printed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, "-m", "lightning_fed", "fit", "--model.help", "PFedLoRA"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.fullmatch(r"lightning-fed \d+\.\d+\.\d+\n", printed(capsys, "--version"))


@pytest.mark.parametrize("args", [["fit", "--help"], ["fit", "--model.help", "PFedLoRA"], ["test", "--help"]])
def test_help_of_a_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, *args)
    expected = ["--model.mu MU"] if "PFedLoRA" in args else ["--federation.rounds", "--ckpt_path", "--trainer.accelerator"]
    assert all(option in said for option in expected)
    assert re.findall(r":\w+:`|``|ENV:", said) == []
    assert max(map(len, said.splitlines())) <= 80
    if args[1] == "--help":
        assert len(said.splitlines()) < 80


@pytest.mark.parametrize(
    ("option", "name", "summary"),
    [
        ("model", "FedAvgM", "FedAvg with momentum on the server: v ← beta v + (mean w - w), w ← w + eta v:"),
        ("model", "FedProx", "a client minimises L_k(w) + mu / 2 ‖w - w^t‖^2 (eq. 2), over the trainable parameters"),
        ("data", "CSVFiles", "unchanged or standardized; a categorical column becomes a 0 or 1 for each of its categories:"),
    ],
)
def test_help_of_a_class_begins_with_its_first_paragraph(
    option: str, name: str, summary: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(capsys, "fit", f"--{option}.help", name)
    assert summary in " ".join(said.partition("  --")[0].split())


@pytest.mark.parametrize("topic", ["all", "trainer", "federation"])
def test_help_of_a_topic(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All options, but none that would be refused, and nobody's internals."""
    said = printed(capsys, "fit", "--help", topic)
    blocks = ("data", "model", "federation", "trainer") if topic == "all" else (topic,)
    assert {option.split(".")[0] for option in re.findall(r"^  --(\w+\.\w+)", said, re.MULTILINE)} == set(blocks)
    refused = ("max_epochs", "max_steps", "accumulate_grad_batches", "gradient_clip_val", "logger", "enable_checkpointing")
    assert not any(f"--trainer.{name} " in said for name in refused)
    assert not re.findall(r":\w+:`|``|known subclasses|LightningCLI|applied on|override", said)
    assert ("--trainer.precision" in said) == (topic != "federation")


def test_an_unknown_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'rounds'" in refused(capsys, "fit", "--help", "rounds")


def test_print_config_is_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(printed(capsys, "fit", "--config", FIVE_NETWORKS, "--federation.rounds=3", "--print_config"))
    assert config["federation"]["rounds"] == 3
    assert config["data"]["class_path"] == "lightning_fed.data.Digits"
    assert config["model"]["init_args"]["mu"] == 0.9
    assert len(config["model"]["init_args"]["backbone"]) == 5


# ----------------------------------------------------------------------------------------------------------------- runs


def test_a_run_prints_next_to_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """No line per turn, no tips, no warnings: not one line without the progress bar."""
    fit()
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == ""


def test_progress_prints_a_table_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    fit("--federation.progress=true", "--model.fine_tuning.epochs=1")
    said = capfd.readouterr()
    assert said.err == ""
    lines = said.out.splitlines()
    assert len(lines) < 26
    for text in ("PFedLoRA: 3 clients, round 2 of 2", "worst client", "baseline: majority label", "values sent", "FLOPs"):
        assert text in said.out
    assert lines[-3:] == [
        "To see what sharing gains, train the same clients alone:",
        "lightning-fed fit --config runs/version_0/config.yaml --model Standalone --model.fine_tuning null",
        "Tables: runs/version_0",
    ]
    assert not re.search(r"GPU|Tip|Trainer|workers|Seed", said.out)


def test_the_command_that_is_advised_is_accepted(capfd: pytest.CaptureFixture[str]) -> None:
    """Alone, clients send nothing that could be averaged robustly or moved by an optimizer."""
    of_updates = ["--model.server_optimizer=ServerSGD", "--federation.aggregation=Median", "--model.fine_tuning.epochs=1"]
    fit("--model=FedPer", "--model.backbone=CNN1", "--federation.progress=true", "--federation.rounds=1", *of_updates[1:])
    fit("--model=FedPer", "--model.backbone=CNN1", "--federation.progress=true", "--federation.rounds=1", *of_updates[::2])
    advised = [line for line in capfd.readouterr().out.splitlines() if "--model Standalone" in line]
    assert [line.count(" null") for line in advised] == [2, 2]
    for line in advised:
        main([*shlex.split(line)[1:], "--federation.progress=false"])


def test_a_run_keeps_its_configuration_and_can_be_repeated_from_it() -> None:
    fit("--federation.rounds=1", "--seed_everything=3", "--data.init_args.num_clients=2")
    saved = yaml.safe_load(Path("runs/version_0/config.yaml").read_text())
    assert (saved["seed_everything"], saved["federation"]["rounds"]) == (3, 1)
    main(["fit", "--config", "runs/version_0/config.yaml"])
    one, other = (final_checkpoint(Path(f"runs/version_{number}")) for number in (0, 1))
    assert one[:3] == other[:3]
    assert one[1]["seed"] == 3


def test_the_printed_command_plays_the_same_federation_without_sharing(capsys: pytest.CaptureFixture[str]) -> None:
    """Into the same folder; what is asked of the method that was played first is still answered of it."""
    fit("--federation.rounds=1", "--federation.progress=true", "--seed_everything=3")
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("lightning-fed "))
    main(shlex.split(command)[1:])
    (_, first, *_), (_, identity, history, server, clients) = (final_checkpoint(Path(f"runs/version_{k}")) for k in (0, 1))
    assert identity == first | {"method": "Standalone"}
    assert (len(clients), len(history), server) == (2, 1, {})  # two take part
    for method, number in (("PFedLoRA", 0), ("Standalone", 1)):
        capsys.readouterr()
        main(["test", "--config", "config.yaml", "--model", method, "--federation.progress=true", "--seed_everything=3"])
        first, title, *_ = capsys.readouterr().out.splitlines()
        assert (first, title.strip()) == (f"Evaluated: runs/version_{number}", f"{method}: 3 clients, after round 1")


def test_validate_and_test_measure_the_newest_run(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--federation.progress=true")
    last = final_checkpoint(Path("runs/version_0"))[2][-1]
    for verb, kind in (("test", "test"), ("validate", "val")):
        capsys.readouterr()
        main([verb, "--config", "config.yaml"])  # also where the file says progress: false
        said = capsys.readouterr().out
        assert "PFedLoRA: 3 clients, after round 2" in said
        assert f"{kind} accuracy" in said
        accuracies, losses = (
            [last[f"after/{kind}_{name}/{end}"] for end in ("mean", "min", "max")] for name in ("accuracy", "loss")
        )
        in_words = " +│ +".join(f"{100 * value:.2f} %" for value in accuracies)
        assert re.search(rf"→ after aggregation, all clients +│ +{in_words} │", said)  # as fit says it
        in_words = " +│ +".join(f"{losses[k]:.4f}" for k in (0, 2, 1))
        assert re.search(rf"loss, after aggregation +│ +{in_words} │", said)
    assert [path.name for path in Path("runs").iterdir()] == ["version_0"]


def test_ckpt_path_last_continues() -> None:
    fit("--federation.rounds=1")
    fit("--federation.rounds=2", "--ckpt_path", "last")
    assert [path.name for path in Path("runs").iterdir()] == ["version_0"]
    assert final_checkpoint(Path("runs/version_0"))[0] == 2
    config = yaml.safe_load(Path("runs/version_0/config.yaml").read_text())
    assert (config["federation"]["rounds"], config["ckpt_path"]) == (2, None)


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves it in ``--option=~/runs``, and it may be in a file; a folder ~ would be deleted with all of the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fit("--federation.run_dir=~/runs")
    main(["export", "--config=config.yaml", "--ckpt_path=~/runs/version_0", "--output=~/model"])
    main(["predict", "--config=~/runs/version_0/config.yaml", "--output=~/answers.csv"])
    main(["runs", "~/runs"])
    main(["report", "~/runs", "--output=~/report"])
    fit("--federation.rounds=1", "--federation.run_dir=~not a user")
    assert sorted(path.name for path in Path("home").iterdir()) == ["answers.csv", "model", "report", "runs"]
    assert Path("~not a user/version_0").is_dir()
    assert not Path("~").exists()
    Path("my.sweep.yaml").write_text("{base: ~/base.yaml, folder: ~/swept, seeds: [0], methods: {A: {model: FedAvg}}}")
    assert read_sweep(Path("my.sweep.yaml")).folder == tmp_path / "home/swept"


def test_a_network_of_another_library_by_its_path() -> None:
    short = ["--federation.rounds=1", "--data.init_args.num_clients=2", "--trainer.limit_train_batches=1"]
    short += ["--data.init_args.image_size=8", "--data.init_args.batch_size=8", "--trainer.limit_test_batches=1"]
    resnet, option = "torchvision.models.resnet18", "--model.init_args.backbone"
    fit("--model=FedAvg", option, resnet, *short)
    wrapped = [f"{option}.init_args.network", resnet, f"{option}.init_args.head", "fc"]
    fit("--model=FedPer", option, "Wrapped", *wrapped, *short)
    whole, base = (final_checkpoint(Path(f"runs/version_{number}"))[3] for number in (0, 1))
    assert whole.keys() - base.keys() == {"backbone.network.fc.weight", "backbone.network.fc.bias"}
    assert yaml.safe_load(Path("runs/version_0/config.yaml").read_text())["model"]["init_args"]["backbone"] == resnet


WRITTEN_CNN5 = {"class_path": "lightning_fed.models.CNN5", "init_args": {"width": 1.0}}


@pytest.mark.parametrize(
    ("config", "given", "written"),
    [
        ("pfedlora/digits.yaml", "[torchvision.models.resnet18, CNN5]", ["torchvision.models.resnet18", WRITTEN_CNN5]),
        ("pfedlora/digits.yaml", "lightning_fed.models.CNN5", WRITTEN_CNN5),
        ("pf2lora/sst2.yaml", "owner/name@revision", "owner/name@revision"),
        ("pf2lora/sst2.yaml", "models/mine", "models/mine"),
    ],
)
def test_a_network_that_is_given_by_its_name_is_written_so(config: str, given: Any, written: Any, capsys: Any) -> None:
    said = printed(capsys, "fit", "--config", str(CONFIGS / config), "--model.init_args.backbone", given, "--print_config")
    assert yaml.safe_load(said)["model"]["init_args"]["backbone"] == written


def test_a_function_of_torchvision_may_have_options(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model.backbone", "torchvision.models.resnet18", "--model.backbone.num_classes=10", "--model.backbone.groups=1"]
    said = printed(capsys, "fit", "--config", str(CONFIGS / "quickstart.yaml"), *given, "--print_config")
    [backbone] = yaml.safe_load(said)["model"]["init_args"]["backbone"]
    assert backbone["class_path"] == "torchvision.models.resnet18"
    assert backbone["init_args"] == backbone["init_args"] | {"num_classes": 10, "groups": 1}


def test_a_loss_and_a_headline_of_ones_own() -> None:
    loss = "--model.init_args.loss"
    options = [f"{loss}.init_args.label_smoothing=0.1", f"{loss}.init_args.weight=[1,1,1,1,1,1,1,1,1,2]"]
    fit(loss, "torch.nn.CrossEntropyLoss", *options, "--model.init_args.metric=f1", "--federation.rounds=1")
    saved = yaml.safe_load(Path("runs/version_0/config.yaml").read_text())["model"]["init_args"]
    assert saved["loss"]["init_args"]["weight"] == [1.0] * 9 + [2.0]
    assert saved["metric"] == "f1"
    assert "selected/test_f1" in final_checkpoint(Path("runs/version_0"))[2][-1]
    main(["fit", "--config", "runs/version_0/config.yaml"])
    one, other = (final_checkpoint(Path(f"runs/version_{number}")) for number in (0, 1))
    assert one[2] == other[2]


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("unknown", ["PFedLora", "lightning_fed.methods.PFedLora"])
def test_an_unknown_method_lists_the_known_ones(unknown: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "fit", "--config", "config.yaml", "--model", unknown)
    assert "'PFedLora'" in message
    assert all(method in message for method in methods)


CLASSES = "--data.init_args.partition.init_args.classes"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--federation.participation=0"], ["federation.participation: got 0, expected a number above 0 up to 1"]),
        (["--federation.rounds=0"], ["federation.rounds: got 0, expected a number from 1 up to 4294967295"]),
        (["--model.init_args.mu=1.5"], ["model.mu: got 1.5, expected a number from 0 up to 1"]),
        (["--model.init_args.backbone=torchvision.models.resnet19"], ["There is no 'torchvision.models.resnet19'", "dotted path"]),
        (["--model.init_args.metric=f2"], ["metric is 'f2'", "accuracy, f1, matthews"]),
        (["--model.init_args.cut=fc7"], ["CNN5 cannot be cut at 'fc7'", "['conv', 'fc1', 'features']"]),
        ([f"{CLASSES}=11"], ["classes=11", "the data have 10", "at most 10"]),
        (["--data.init_args.num_clients=1798"], ["1798 clients cannot share 1797 examples"]),
        (["--data=CIFAR10", "--data.init_args.root=nowhere"], ["Found no CIFAR10 in ", "nowhere", "--data.init_args.root"]),
        (["--data.init_args.image_size=28"], ["CNN5 got images of shape (3, 28, 28)", "set the data's image_size to 32"]),
        (["--trainer.limit_train_batches=0"], ["trainer.limit_train_batches is 0", "learn nothing"]),
        (["--ckpt_path=nowhere"], ["No checkpoint at nowhere"]),
        (["--ckpt_path=best"], ["There is no checkpoint of PFedLoRA in runs: fit first"]),
        (["--ckpt_path"], ["--ckpt_path has no value: write --ckpt_path=VALUE."]),
        (["--model.optimizer.lr"], ["error: --model.optimizer.lr has no value: write --model.optimizer.lr=VALUE."]),
        (["--model.optimizer.lr", "--model.epochs", "1"], ["error: --model.optimizer.lr has no value"]),
        (["--federation.logger=wandb"], ["there is no 'wandb' (did you mean WandbLogger?); known are", "CSVLogger"]),
        (["--federation.aggregation=median"], ["there is no 'median' (did you mean Median?); known are", "TrimmedMean"]),
        (["--federation.attack=flip"], ["there is no 'flip' (did you mean SignFlip?); known are LabelFlip"]),
        (["--federation.privacy=client"], ["there is no 'client'", "ExampleDP"]),
        (["--federation.privacy=ClientDP", "--federation.privacy.clip=-1"], ["clip: got -1, expected a number above 0\n"]),
        (["--config=nowhere.yaml"], ["There is no configuration 'nowhere.yaml'"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_bad_input_is_one_line(args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "fit", "--config", "config.yaml", *args)
    for part in parts:
        assert part in message


def test_what_a_verb_needs_is_named_as_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "arguments are required: --output\n" in refused(capsys, "predict", "--config", "config.yaml")


def test_different_networks_for_a_method_that_averages_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal of a constructor, which jsonargparse wraps."""
    message = refused(capsys, "fit", "--config", FIVE_NETWORKS, "--model", "FedAvg")
    assert "FedAvg got 5 different backbones" in message
    assert "Union" not in message


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    known = "there is no command 'train'; there are fit, validate, test, predict, export, privacy, configs, sweep"
    assert known in refused(capsys, "train")
    assert "there is no command 'reports' (did you mean report?); there are" in refused(capsys, "reports")


def test_a_client_that_diverges_ends_the_run_and_leaves_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    fit("--federation.rounds=1")
    diverging = ["--model.init_args.optimizer=torch.optim.SGD", "--model.init_args.optimizer.init_args.lr=1e30"]
    said = refused(capsys, "fit", "--config", "config.yaml", "--ckpt_path=last", *diverging)
    assert re.search(r"client \d .*(NaN|nan|inf).*diverged; lower the learning rate", said, re.IGNORECASE)
    assert final_checkpoint(Path("runs/version_0"))[0] == 1


@pytest.mark.parametrize(
    ("end", "code", "what"), [(KeyboardInterrupt, 130, "interrupted"), (Preempted, 75, "stopped at a checkpoint (SIGUSR1)")]
)
def test_an_interrupted_run_says_the_command_that_continues_it(
    end: type[BaseException], code: int, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: list[str]) -> None:
        raise end

    commands = {
        "fit": " Continue with: lightning-fed fit --config 'my own.yaml' --ckpt_path last",
        "sweep": " Go on with: lightning-fed sweep --config 'my own.yaml'",
        "test": "",
    }
    for module in ("fit", "sweep"):
        monkeypatch.setattr(f"lightning_fed.cli.{module}.run", interrupted)
    for verb, said in commands.items():
        with pytest.raises(SystemExit) as error:
            main([verb, "--config", "my own.yaml"])
        assert error.value.code == code
        assert capsys.readouterr().err == f"lightning-fed: {what}.{said}\n"


@pytest.mark.parametrize("given", [["--ckpt_path=last"], ["--ckpt_path", "runs/version_0"]])
def test_a_continued_run_that_is_interrupted_names_one_checkpoint(given: list[str]) -> None:
    command = how_to_continue(["fit", "--config", "mine.yaml", *given, "--model=FedAvg"])
    assert command == " Continue with: lightning-fed fit --config mine.yaml --model=FedAvg --ckpt_path last"
