"""Configurations that cannot work: refused in one line that names the option, exit code 2, before there is a run folder."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_commands
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from tiny import Net, new_data, new_federation

import lightning_fed.data
from lightning_fed.__main__ import main
from lightning_fed.cli.dry_run import check_start, read
from lightning_fed.cli.refusals import known
from lightning_fed.cli.trainer import settings_of
from lightning_fed.data import FederatedDataModule, TableData
from lightning_fed.engines.preflight.trainer_options import REFUSED
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg

CONFIG = """
data:
  class_path: Digits
  init_args:
    num_clients: 3
    partition: {class_path: ClassesPerClient, init_args: {classes: 2}}
    image_size: 8
model:
  class_path: FedAvg
  init_args:
    backbone: {class_path: MLP, init_args: {inputs: 192, hidden: [8]}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
federation: {rounds: 1, progress: false, logger: false}
trainer: {accelerator: cpu, limit_train_batches: 1}
"""
M, D = "--model.init_args.", "--data.init_args."


class Untyped(FedAvg):
    def __init__(self, backbone, num_classes=None, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(backbone, num_classes, **kwargs)


@pytest.fixture(autouse=True)
def config() -> None:
    Path("config.yaml").write_text(CONFIG)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What is said of a command that is refused; it must have left nothing."""
    before = set(Path().rglob("*"))
    said = tiny_commands.refused(capsys, *args, silent=True)
    assert len(said) < 1000
    assert {path for path in set(Path().rglob("*")) - before if path.name != "runs"} == set()
    return said


def check(capsys: pytest.CaptureFixture[str], args: list[str], parts: list[str]) -> None:
    message = refused(capsys, "fit", "--config", "config.yaml", *args)
    assert [part for part in parts if part not in message] == [], message
    assert "NestedArg" not in message


def ids(value: object) -> str:
    return " ".join(value)[:60] if isinstance(value, list) and value and str(value[0]).startswith("--") else ""


# ------------------------------------------------------------------------------------------------------------- the trainer


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--trainer.accelerator=foo"], ["trainer.accelerator is 'foo'", "Available names are"]),
        (["--trainer.accelerator=gpu"], ["trainer.accelerator is 'gpu'"]),
        (["--trainer.devices=0"], ["trainer.devices is '0'"]),
        (["--trainer.devices=2"], ["2 devices", "trainer.devices to 1", "--federation.engine Processes"]),
        (["--trainer.num_nodes=2"], ["trainer.num_nodes is 2", "leave it out"]),
        (["--trainer.strategy=ddp"], ["trainer.strategy is DDPStrategy", "--federation.engine Processes"]),
        (["--trainer.strategy=ddp_spawn"], ["trainer.strategy is DDPStrategy"]),
        (["--trainer.strategy=fsdp"], ["trainer.strategy is 'fsdp'"]),
        (["--trainer.precision=transformer-engine"], ["trainer.precision is 'transformer-engine'"]),
        (["--trainer.precision=foo"], ["trainer.precision: got foo, expected ", "bf16-mixed"]),
        (["--trainer.limit_test_batches=0"], ["trainer.limit_test_batches is 0", "nothing could be reported"]),
        (["--trainer.limit_train_batches=0.0001"], ["Client ", "limit_train_batches"]),
        (["--trainer.overfit_batches=1"], ["trainer.overfit_batches is set", "--trainer.limit_train_batches"]),
        (["--trainer.profiler=simple"], ["trainer.profiler is set", "cProfile"]),
        (["--trainer.plugins=foo"], ["trainer.plugins: there is no 'foo'"]),
        (["--trainer.callbacks=EarlyStopping"], ["trainer.callbacks", "monitor"]),
        (["--trainer.callbacks+=ModelCheckpoint"], ["has ModelCheckpoint", "--federation.checkpoint_every"]),
        (["--trainer.callbacks+=LearningRateMonitor"], ["has LearningRateMonitor", "lr/<phase>"]),
    ],
    ids=ids,
)
def test_trainer_options(args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(capsys, args, parts)


@pytest.mark.parametrize("option", REFUSED)
def test_options_without_effect_are_refused_and_say_what_to_do(option: str) -> None:
    with pytest.raises(FederationError, match=rf"^trainer\.{option} is set, but .*: .*\.$"):
        settings_of({option: "anything"})


@pytest.mark.parametrize("option", ["max_epochs", "max_steps", "max_time", "accumulate_grad_batches", "num_sanity_val_steps"])
def test_nothing_is_an_option_without_effect_too(option: str) -> None:
    with pytest.raises(FederationError, match=rf"^trainer\.{option} is set, but "):
        settings_of({option: 0})


@pytest.mark.parametrize(
    "name",
    ["RichProgressBar", "TQDMProgressBar", "RichModelSummary", "DeviceStatsMonitor", "WeightAveraging", "BatchSizeFinder"],
)
def test_callbacks_that_a_quiet_trainer_cannot_have(name: str) -> None:
    import lightning.pytorch.callbacks as of_lightning

    callback = getattr(of_lightning, name)()
    for given in (callback, [Callback(), callback]):
        with pytest.raises(FederationError, match=rf"trainer\.callbacks has {name}, but "):
            settings_of({"callbacks": given})
    own = Callback()
    assert settings_of({"callbacks": [own], "precision": 16, "min_steps": None}) == {"callbacks": [own], "precision": 16}


def test_what_works_works() -> None:
    """Steps of a large network are counted without values, which could be anomalous."""
    options = ["detect_anomaly=true", "precision=bf16-mixed", "inference_mode=false"]
    large = f"{M}backbone.init_args.hidden=[1000, 200]"
    check_start("it", ["fit", "--config", "config.yaml", large, *(f"--trainer.{option}" for option in options)])


# ----------------------------------------------------------------------------------------------------- nulls, and numbers


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([f"{M}epochs=null"], ["model.epochs is null"]),
        ([f"{M}optimizer=null"], ["model.optimizer is null"]),
        (["--model=FedProx", f"{M}mu=null"], ["model.mu is null"]),
        ([f"{M}optimizer.init_args.lr=null"], ["model.optimizer.lr is null: give a value"]),
        ([f"{M}optimizer.init_args.lr=nan"], ["model.optimizer.lr: got nan, expected a number"]),
        ([f"{M}optimizer.init_args.lr=-1"], ["model.optimizer: SGD takes no such settings", "Invalid learning rate: -1.0"]),
        ([f"{M}optimizer.init_args.nesterov=true"], ["model.optimizer: SGD", "Nesterov momentum requires"]),
        ([f"{M}optimizer=torch.optim.LBFGS"], ["is LBFGS", "SGD or AdamW"]),
        ([f"{M}optimizer=torch.optim.SparseAdam"], ["the first step failed", "does not support dense gradients"]),
        (
            [f"{M}optimizer.init_args.lr=1e30", f"{M}epochs=3"],
            ["learning rate of model.optimizer, which is 1e+30"],
        ),
        ([f"{M}backbone.init_args.inputs=100"], ["the first step failed: MLP, given inputs uint8 (3, 8, 8)", "192 and 100"]),
        ([f"{M}loss=torch.nn.CrossEntropyLoss", f"{M}loss.init_args.weight=[1, 2]"], ["the first step failed", "targets int64 ()"]),
        ([f"{D}batch_size=null"], ["data.batch_size is null"]),
        ([f"{D}image_size=null"], ["data.image_size is null"]),
        ([f"{D}partition.init_args.classes=null"], ["data.partition.classes: got null, expected a number"]),
        (["--federation.rounds=null"], ["federation.rounds: got null, expected a number"]),
        (["--federation.keep=null"], ["federation.keep: got null, expected all or last or none"]),
        (["--federation.rounds=1.5"], ["federation.rounds: got '1.5', expected a whole number"]),
        (
            [f"{M}backbone=MLP", f"{M}backbone.hiden=[3]"],
            ["model.backbone: Option 'hiden' is not accepted by MLP (did you mean hidden?)"],
        ),
        (["--federation.rounds=[1, 5]"], ["federation.rounds: got a list, expected a whole number"]),
        ([f"{M}epochs=[1, 5]"], ["model.epochs: got [1, 5], expected a whole number"]),
        ([f"{M}epochs={{a: 1}}"], ["model.epochs: got {'a': 1}, expected a whole number"]),
        (["--federation.dropout=[0.1]"], ["federation.dropout: got a list, expected a number"]),
        (["--federation.target=nan"], ["federation.target: got nan, expected a number or null"]),
        (["--federation.store_limit_mb=inf"], ["store_limit_mb=inf: give a number above 0"]),
        (["--federation.progress=maybe"], ["federation.progress: got maybe, expected true or false"]),
        (["--seed_everything=null"], ["seed_everything: got null, expected true or false or a whole number"]),
        (["--seed_everything=true"], ["seed_everything is True: give a whole number from 0"]),
        (["--config=quickstart.sweep"], ["quickstart.sweep is a comparison", "lightning-fed sweep --config quickstart.sweep"]),
        (["--seed_everything=4294967296"], ["seed_everything is 4294967296", "0 to 4294967295"]),
    ],
    ids=ids,
)
def test_nulls_and_numbers(args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(capsys, args, parts)


def test_a_number_or_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--config", "config.yaml", "--output", "o", "--client", "Paris"])
    assert capsys.readouterr().err.rstrip().endswith("client: got 'Paris', expected a whole number or all")


def test_null_replaces_what_a_file_sets_for_an_option_of_an_option() -> None:
    args = ["fit", "--config", "instructions/flowertune_general"]
    assert read("it", args)["model.backbone.quantization"] == "nf4"
    assert read("it", [*args, f"{M}backbone.init_args.quantization=null"])["model.backbone.quantization"] is None


def test_defaults_are_no_nulls() -> None:
    """A configuration that a run has kept has nulls for what has no value: they read."""
    main(["fit", "--config", "config.yaml"])
    assert "null" in (kept := Path("runs/version_0/config.yaml")).read_text()
    assert read("kept", ["fit", "--config", str(kept)])["federation.rounds"] == 1


# -------------------------------------------------------------------------------------------------- names, in files and not


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([f"{M}epocs=1"], ["model: Option 'epocs' is not accepted by FedAvg (did you mean epochs?)"]),
        ([f"{M}backbone.init_args.hiden=[3]"], ["model.backbone: Option 'hiden'", "by MLP (did you mean hidden?)"]),
        ([f"{M}optimizer.init_args.lrr=1"], ["model.optimizer: Option 'lrr'", "by SGD (did you mean lr?)"]),
        ([f"{D}partition.init_args.clases=2"], ["data.partition", "by ClassesPerClient (did you mean classes?)"]),
        ([f"{M}optimizer=0.1"], ["model.optimizer: got 0.1, expected the name of a class"]),
        ([f"{M}optimizer={{class_path: torch.optim.SGD, lr: 1}}"], ["optimizer: the options of a class stand in its init_args"]),
        (["--rounds=3"], ["--rounds=3 (did you mean --federation.rounds?); see"]),
        (["more.yaml"], ["unrecognized arguments: more.yaml; ", "--config FILE"]),
        ([f"--config={Path.cwd().anchor}"], ["/ is a folder: give a file"]),
        ([f"{M}optimizer=Adamm"], ["model.optimizer: there is no 'Adamm' (did you mean Adam?)"]),
        (["--lr=0.1"], ["--lr=0.1 (it belongs to the optimizer: --model.init_args.optimizer.init_args.lr)"]),
        ([f"{M}lr=0.1"], ["'lr' is not accepted by FedAvg (it belongs to the optimizer: --model.", "--model.help FedAvg"]),
        ([f"{M}fine_tuning.part=null"], ["model.fine_tuning.part: got null, expected all or head or private"]),
        ([f"{M}fine_tuning=foo"], ["model.fine_tuning: got foo, expected options by name: epochs, steps, part, when, optimizer"]),
        ([f"{M}adapters=3"], ["model.adapters: got 3, expected options by name: r, lora_alpha, target_modules"]),
        ([f"{M}adapters.r=0"], ["model.adapters.r: got 0, expected a number from 1"]),
        (["--federation.compression.up=int9"], ["federation.compression.up: got 'int9', expected none or bf16 or int8 or topk"]),
        (["--model=FML", f"{M}shared=x"], ["model: Option 'shared' is not accepted by FML; "]),
        (
            ["--federation.round=3"],
            ["--federation.round=3 (did you mean --federation.rounds?); see lightning-fed fit --help federation"],
        ),
        (["--trainer.acelerator=cpu"], ["(did you mean --trainer.accelerator?)"]),
        (["--config={trainer: {acelerator: cpu}}"], ["'trainer.acelerator' is not accepted (did you mean trainer.accelerator?)"]),
        (["--model=FedAgv"], ["model: there is no 'FedAgv' (did you mean FedAvg?); known are "]),
        (
            ["--federation.engine=Proceses"],
            ["federation.engine: there is no 'Proceses' (did you mean Processes?); known are InPro"],
        ),
        ([f"{M}backbone=SmalCNN"], ["model.backbone: there is no 'SmalCNN' (did you mean SmallCNN?)"]),
        (
            [f"{M}optimizer=torch.optim.SDG"],
            ["model.optimizer: module 'torch.optim' has no attribute 'SDG'", "(did you mean SGD?)"],
        ),
        (["--model.loss=CrossEntropyLoss"], ["model.loss: there is no", "(did you mean torch.nn.CrossEntropyLoss?)"]),
        (["--model.server_optimizer=ServerAdan"], ["(did you mean ServerAdam?); known are ServerAdagrad, ServerAdam"]),
        (["--model=my_labb.Own"], ["No module named 'my_labb'; for a file in this folder, start the command with PYTHONPATH=."]),
        (["--model=lightning_fed.methods.FedAvgg"], ["(did you mean FedAvg?)"]),
        (["--model=FFALoRA"], ["required: backbone; the one of the configuration, if it has one, does not fit the method"]),
        (["--model=lightning_fed.FederatedModule"], ["model is a FederatedModule", "FedAvg"]),
        (["--data=ScaledColumns"], ["data is a ScaledColumns, which is only a base class", "CSVFiles"]),
        (["--data.init_args.public.limit_examples=3"], ["data.public is a FederatedDataModule, which is only a base", "CSVFiles"]),
        (["--federation.privacy.clip=1"], ["privacy: a DifferentialPrivacy is only a base class", "ClientDP, ExampleDP"]),
        (["--model=" + "a" * 5000], ["there is no 'aaa", "…"]),
        ([f"{M}backbone=os.system"], ["system cannot be called with"]),
        (["--model=FFALoRA", f"{M}backbone=MLP"], ["FFALoRA takes networks of the transformers library, not MLP; known are "]),
        (["--model=FFALoRA", f"{M}backbone=MLP", f"{M}backbone.inputs=3"], ["library, not MLP; known", " TransformerClassifier, "]),
        (["--model=FFALoRA", f"{M}backbone=TransformerLMs", f"{M}backbone.name=x"], ["(did you mean TransformerLM?); known are"]),
        (["--model=FFALoRA", f"{M}backbone=[MLP]"], ["model.backbone: got ['MLP'], expected the name of a class"]),
        (
            [f"--config={{model: {{class_path: {__name__}.Untyped, init_args: {{backbone: {{class_path: MLP}}}}}}}}"],
            ["Untyped takes backbone without a type"],
        ),
        ([f"{M}lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau"], ["model.lr_scheduler: ReduceLROnPlateau needs a metric"]),
        ([f"--model={__name__}.Untyped"], ["Untyped takes backbone without a type", "write backbone: Backbones in its __init__"]),
        (["--model=lightning_fed.data.Digits"], ["model: lightning_fed.data.Digits is no FederatedModule; known are APFL"]),
        (["--config={a: 1, a: 2}"], ["'a' is given twice"]),
        (["--trainer={max_steps: 1, max_steps: 2}"], ["trainer", "'max_steps' is given twice"]),
    ],
    ids=ids,
)
def test_names(args: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    check(capsys, args, parts)


def test_data_that_are_offered_have_examples() -> None:
    offered = [getattr(lightning_fed.data, name) for name in known("data")]
    bases = [FederatedDataModule.load, TableData.read]
    assert [kind for kind in offered if kind.load in bases or getattr(kind, "read", None) in bases] == []


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("  class_path: FedAvg\n", "", ["model is a FederatedModule", "has no class_path", "FedAvg, "]),
        ("  class_path: Digits\n", "", ["data names no class: give class_path, such as Digits"]),
        ("class_path: ClassesPerClient, ", "", ["partition names no class: give class_path, such as IID"]),
        ("  class_path: FedAvg", "  class_pth: FedAvg", ["model: got ", "class_path and init_args (did you mean class_path?)"]),
        ("hidden:", "hiden:", ["'hiden' is not accepted by MLP (did you mean hidden?)"]),
        ("model:", "modle:", ["'modle.", "(did you mean model?)"]),
        ("trainer:", "trainr:", ["'trainr.accelerator' is not accepted (did you mean trainer.accelerator?)"]),
        (
            "    num_clients: 3\n",
            "    num_clients: 3\n    num_clients: 4\n",
            ["'num_clients' is given twice, in lines 5 and 6"],
        ),
        ("trainer:", "data: {}\ntrainer:", ["config.yaml", "'data' is given twice"]),
        ("{rounds: 1", "{rounds: 1, rounds: 2", ["config.yaml", "'rounds' is given twice"]),
        (CONFIG, "", ["config.yaml is empty"]),
        (CONFIG, "[]", ["config.yaml holds list"]),
        (CONFIG, "a: [", ["config.yaml is not YAML"]),
        pytest.param(CONFIG, "a: " + 200_000 * "[", ["config.yaml is not YAML"], id="deep"),  # of which PyYAML's loader in C dies
        (CONFIG, "\0", ["config.yaml is not YAML"]),
        (CONFIG, "a: !!python/object/apply:os.system ['touch pwned']", ["config.yaml is not YAML"]),
        (CONFIG, "[" * 1200, ["config.yaml is not YAML"]),
        (
            "federation: {rounds: 1, progress: false, logger: false}",
            "federation: 3",
            ["config.yaml: federation is 3, expected"],
        ),
        ("trainer: {accelerator: cpu, limit_train_batches: 1}", "trainer: foo", ["trainer: got 'foo', expected options by name"]),
        ("accelerator: cpu", "accelerator: null", ["trainer.accelerator", "null"]),
    ],
)
def test_files(old: str, new: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert old in CONFIG
    Path("config.yaml").write_text(CONFIG.replace(old, new, 1))
    check(capsys, [], parts)


def test_files_in_other_encodings(capsys: pytest.CaptureFixture[str]) -> None:
    for encoding, byte in (("latin1", len(CONFIG) + 2), ("utf-16", 0)):
        Path("config.yaml").write_bytes((CONFIG + "# é").encode(encoding))
        check(capsys, [], [f"config.yaml is not text in UTF-8 (byte {byte})"])
    Path("config.yaml").write_bytes(b"\xef\xbb\xbf" + CONFIG.encode())  # as some editors begin files
    assert read("bom", ["fit", "--config", "config.yaml"])["federation.rounds"] == 1


def test_a_key_that_is_merged_and_given_is_given_once() -> None:
    Path("config.yaml").write_text(CONFIG.replace("federation: {rounds: 1", "federation: {<<: {rounds: 2}, rounds: 1"))
    assert read("merged", ["fit", "--config", "config.yaml"])["federation.rounds"] == 1


# ------------------------------------------------------------------------------------------------------------- run folders


@pytest.mark.parametrize(
    ("run_dir", "why"),
    [
        ("file", "(Not a directory)"),
        ("file/below", "(Not a directory)"),
        ("a\0b", "null byte"),
        ("a" * 300, "(File name too long)"),
        ("a/" * 3000, "(File name too long)"),
        ("/dev/null", "(Not a directory)"),
        ("/proc/runs", "/proc"),
        ("loop", "(Too many levels of symbolic links)"),
    ],
    ids=["file", "below a file", "NUL", "300 characters", "6000 characters", "device", "read-only", "circle"],
)
def test_run_folders(run_dir: str, why: str) -> None:
    Path("file").touch()
    Path("loop").symlink_to("loop")
    with pytest.raises(FederationError, match=rf"^The folder of runs is .*{re.escape(why)}.*set another run_dir\.$"):
        new_federation(run_dir=run_dir).fit(FedAvg(Net), new_data())


def test_a_run_that_is_refused_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it is that refuses: the run's folder, data, networks, the Trainer."""
    Path("file").touch()
    for option in ("--federation.run_dir=file/below", f"{D}num_clients=5000", f"{M}metric=f7"):
        refused(capsys, "fit", "--config", "config.yaml", option)
        assert not Path("runs").exists()


# ------------------------------------------------------------------------------------------------------- sweeps and reports

SWEEP = {"base": "config.yaml", "folder": "sweep", "methods": {"FedAvg": {}}, "seeds": [0]}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"base": ["a"]}, "base is ['a'], expected a path"),
        ({"folder": 3}, "folder is 3, expected a path"),
        ({"folder": "config.yaml/sweep"}, "The folder of runs is 'config.yaml/sweep'"),
        ({"seeds": [True, 1]}, "seeds is [True, 1]"),
        ({"seeds": [2**32]}, "from 0 to 4294967295"),
        ({"threads": None}, "threads is None"),
        ({"published": 3}, "published is 3, expected a list"),
        ({"published": [{"method": "FedAvg", "mean": "high"}]}, "mean 'high' of 'FedAvg', expected a number"),
        ({"report": {"target": "high"}}, "report.target is 'high', expected a number"),
        ({"report": {"pooled": 1}}, "report.pooled is 1, expected true or false"),
        ({"methods": {"a" * 300: {}}}, "shorten the method's name"),
        ({"methods": {"FedAvg": {"trainer.devices": 2}}}, "a client trains on one"),
        ({"methods": {"FedAvg": {"model.init_args.backbone.init_args.inputs": 100}}}, "the first step failed"),
        ({"methods": {"FedAvg": {"trainer.callbacks": "LearningRateMonitor"}}}, "LearningRateMonitor"),
    ],
    ids=str,
)
def test_sweeps(changes: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.sweep.yaml").write_text(yaml.safe_dump(SWEEP | changes))
    assert part in refused(capsys, "sweep", "--config", "my.sweep.yaml", "--dry_run")


def test_a_sweep_with_a_key_twice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.sweep.yaml").write_text(yaml.safe_dump(SWEEP) + "seeds: [1]\n")
    message = refused(capsys, "sweep", "--config", "my.sweep.yaml")
    assert "my.sweep.yaml is not YAML: the key 'seeds' is given twice" in message


def test_a_rehearsal_takes_one_step_and_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    check_start("FedAvg", ["fit", "--config", "config.yaml", "--seed_everything=false"])
    assert torch.equal(state, torch.get_rng_state())
    assert not Path("runs").exists()
    with pytest.raises(FederationError, match=r"FedAvg: Client \d in round 1, phase local: the first step failed"):
        check_start("FedAvg", ["fit", "--config", "config.yaml", f"{M}backbone.init_args.inputs=3"])


# --------------------------------------------------------------------------------------------------- configuration is code


def test_what_only_reads_imports_nothing_that_a_file_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    from written_runs import write_sweep

    write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.82], "Standalone": [0.5, 0.51]})
    for path in Path("sweep").rglob("config.yaml"):
        content = yaml.safe_load(path.read_text())
        content["model"]["class_path"] = f"sideeffect.{content['model']['class_path'].rpartition('.')[2]}"
        content["trainer"] = {"callbacks": [{"class_path": "sideeffect.Anything"}]}
        path.write_text(yaml.safe_dump(content))
    Path("sideeffect.py").write_text("from pathlib import Path\nPath('imported').touch()\nclass FedAvg: ...\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    main(["report", "sweep", "--format", "csv"])
    assert "FedAvg" in capsys.readouterr().out
    assert not Path("imported").exists()
    with pytest.raises(SystemExit):  # what plays does import it
        main(["fit", "--config", "config.yaml", "--model=sideeffect.FedAvg"])
    assert Path("imported").exists()
    sys.modules.pop("sideeffect", None)
