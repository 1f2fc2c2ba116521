"""Every configuration that is shipped parses and trains, on data of its own shape that fit in a test."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from often import mostly_slow
from tiny import TINY_TRANSFORMER, TINY_VIT, assert_same_end, final_checkpoint
from tiny_chats import TINY_MODELS, chats, save_chat_tokenizer, write_lines
from tiny_files import write_arrays, write_csv, write_dataset, write_images
from tiny_hospitals import breast_files, heart_files
from tiny_texts import TINY_GPT2, save_tokenizer, save_word_tokenizer, write_e2e, write_glue, write_squad, write_webnlg

import lightning_fed.data
from lightning_fed.__main__ import main
from lightning_fed.cli.dry_run import check_start, read
from lightning_fed.data import FederatedDataModule, InMemory
from lightning_fed.experiments.sweep.settings import read_yaml

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if not path.name.endswith(".sweep.yaml"))
assert CONFIGS


def classes_in(settings: Any) -> set[str]:
    """Names of the classes that a configuration is made of."""
    if isinstance(settings, list):
        return set().union(*map(classes_in, settings))
    if not isinstance(settings, dict):
        return set()
    own = {str(value) for key, value in settings.items() if key in ("class_path", "backbone") and isinstance(value, str)}
    return own.union(*map(classes_in, settings.values()))


config_of = cache(read_yaml)


def with_something_new(paths: list[Path], *blocks: str) -> set[Path]:
    """Those that have a class in some blocks which is in none before them."""
    known, found = set[str](), set[Path]()
    for path in paths:
        config = config_of(path)
        if not (classes := classes_in([config[block] for block in blocks])) <= known:
            found.add(path)
        known |= classes
    return found


LARGE = {"fed_et/cifar10.yaml", "feddecomp/tiny_imagenet.yaml", "fedhm/cifar100.yaml", "fedhm/split_mix_cifar10.yaml"}
"""Of networks that take seconds, and whose methods have tests of their own."""

BEGUN_OFTEN = with_something_new(CONFIGS, "model", "data") - {ROOT / "configs" / path for path in LARGE}
"""What is built and takes a step in the default tests. The others have other numbers."""

RUN_OFTEN = with_something_new(CONFIGS, "data") & BEGUN_OFTEN
"""What is played in the default tests; what is common to all methods, tests/test_every_method.py tries with each of them."""


ONE_OF_EACH = {path.parent: path for path in CONFIGS if path not in BEGUN_OFTEN}
"""By folder, what is parsed as it is in the default tests, of which nothing is built: the others there have other numbers."""


def configs(often: set[Path]) -> pytest.MarkDecorator:
    """Each configuration; slow are those that are not tried often."""
    return pytest.mark.parametrize("path", mostly_slow(CONFIGS, often), ids=lambda path: str(path.relative_to(ROOT / "configs")))


each_config = configs(set(CONFIGS))


class Stand(InMemory):
    """A few examples that look like those of a data set, two of each class and client."""

    def __init__(self, like: str, num_clients: int = 2, channels: int = 3, image_size: int = 32, **kwargs: Any) -> None:
        original: type[FederatedDataModule] = getattr(lightning_fed.data, like)
        labels = torch.arange(original.num_classes).repeat(2 * num_clients)
        example = example_of(like, channels, image_size)
        images = example.expand(len(labels), *[-1] * example.ndim)
        super().__init__(images, labels, original.num_classes, num_clients=num_clients, **kwargs)


def example_of(data: str, channels: int, size: int) -> torch.Tensor:
    if data == "AGNews":
        return torch.randint(0, 100, (64,))
    size = 64 if data == "TinyImageNet" else size
    return torch.randint(0, 256, (channels, size, size), dtype=torch.uint8)


WRITTEN = {"E2E": write_e2e, "WebNLG": write_webnlg}
"""Data of texts that are generated."""

OWN = {
    "ArrayFiles": lambda: {"path": write_arrays(Path("images.npz"))},
    "CSVFiles": lambda: {"path": write_csv(Path("table.csv"))},
    "HFDataset": lambda: {"path": write_dataset(Path("photos"))},
    "ImageFolder": lambda: {"path": write_images(Path("images")), "layout": "user/class", "client": "user"},
}
"""Data of one's own, of two clients."""


HOSPITALS = {"HeartDisease": heart_files, "TCGABRCA": breast_files}
"""Data of hospitals, each of which is a client."""

BEYOND_CLASSES = {"Diabetes": "rmse", "DigitAttributes": "f1", "TCGABRCA": "c_index", "Instructions": "perplexity"}
"""Small data of which something else than one class is predicted, and the monitored metric."""


def made_small(path: Path) -> dict[str, Any]:
    """A shipped configuration on data and networks that fit in a test, written to ``config.yaml``."""
    config = yaml.safe_load(path.read_text())
    like = config["data"]["class_path"]
    small = {"batch_size": 4, "eval_batch_size": 4}
    if like == "GLUE":
        config["data"]["init_args"] |= small | {
            "num_clients": 2,
            "root": write_glue(config["data"]["init_args"]["task"], Path("glue").absolute()),
            "tokenizer": save_tokenizer(Path("tokenizer").absolute()),
        }
        config["model"]["init_args"]["steps"] = 1
        config["model"]["init_args"]["backbone"]["init_args"] = {"config": TINY_TRANSFORMER}
    elif like == "SQuAD":
        root = write_squad(Path("squad").absolute(), config["data"]["init_args"]["version"])
        tokenizer = save_tokenizer(Path("tokenizer").absolute())
        own = {"num_clients": 2, "root": root, "tokenizer": tokenizer, "max_length": 12, "stride": 2}
        config["data"]["init_args"] |= small | own
        config["model"]["init_args"]["steps"] = 1
        config["model"]["init_args"]["backbone"]["init_args"] = {"config": TINY_TRANSFORMER}
    elif like in WRITTEN:
        root, tokenizer = WRITTEN[like](Path("texts").absolute()), save_word_tokenizer(Path("tokenizer").absolute())
        config["data"]["init_args"] |= small | {"num_clients": 2, "root": root, "tokenizer": tokenizer, "metrics": ["bleu"]}
        config["model"]["init_args"]["steps"] = 1
        config["model"]["init_args"]["backbone"]["init_args"] |= {"name": None, "config": TINY_GPT2, "max_new_tokens": 3}
    elif like == "Instructions":
        tokenizer = save_chat_tokenizer(Path("tokenizer").absolute())
        own = {"path": write_lines(Path("chats.jsonl").absolute(), chats(4)), "test_path": None, "tokenizer": tokenizer}
        config["data"]["init_args"] |= small | own | {"columns": None, "client": "who", "num_clients": None, "limit_examples": 8}
        network = {"name": None, "config": TINY_MODELS["llama"], "quantization": None, "max_new_tokens": 3}
        config["model"]["init_args"]["backbone"]["init_args"] |= network
        config["model"]["init_args"]["steps"] = 1
    elif like in OWN:
        config["data"]["init_args"] |= small | OWN[like]()
    elif like in HOSPITALS:
        Path("hospitals").mkdir(exist_ok=True)
        config["data"]["init_args"] |= small | {"num_clients": 2, "root": HOSPITALS[like](Path("hospitals"))}
        config["model"]["init_args"]["steps"] = 2
    elif like in BEYOND_CLASSES:
        config["data"]["init_args"] |= {"num_clients": 2}
    else:
        shape = {key: value for key, value in config["data"]["init_args"].items() if key in ("channels", "image_size")}
        stand = {"class_path": "test_every_config.Stand", "init_args": {"like": like} | shape | small}
        public = {"public": stand} if "public" in config["data"]["init_args"] else {}
        config["data"] = stand | {"init_args": stand["init_args"] | public}
    config["federation"] |= {"rounds": 1, "participation": 0.5, "run_dir": "runs", "progress": False, "logger": False}
    whole_epochs = like in ("GLUE", "SQuAD", *WRITTEN) or config["data"]["init_args"].get("continue_epochs")
    limited = ("val", "test") if whole_epochs else ("train", "val", "test", "predict")
    config["trainer"] |= {"accelerator": "cpu"} | {f"limit_{part}_batches": 1 for part in limited}
    for option in config["model"]["init_args"]:
        if option.endswith(("epochs", "distill_steps")):
            config["model"]["init_args"][option] = 1
    if config["model"]["class_path"] in (
        "FedHM",
        "HeteroFL",
        "FedRolex",
        "SplitMix",
    ):  # singular values of wide layers take seconds
        backbone = config["model"]["init_args"]["backbone"]
        name = backbone if isinstance(backbone, str) else backbone["class_path"]
        config["model"]["init_args"]["backbone"] = {"class_path": name, "init_args": {"width": 0.25}}
    backbone = config["model"]["init_args"]["backbone"]
    if isinstance(backbone, dict) and backbone["class_path"] == "VisionTransformer":
        backbone["init_args"] = {"config": TINY_VIT}
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return config


class TestConfig:
    @each_config
    def test_begins_with_the_command_that_runs_it(self, path: Path) -> None:
        assert path.read_text().splitlines()[0] == f"# lightning-fed fit --config {path.relative_to(ROOT)}"

    @configs({*ONE_OF_EACH.values()})
    def test_parses_as_it_is(self, path: Path) -> None:
        assert read("It", ["fit", "--config", str(path)])["federation.run_dir"].startswith("runs/")

    @configs(BEGUN_OFTEN - RUN_OFTEN)
    def test_begins(self, path: Path) -> None:
        made_small(path)
        check_start("It", ["fit", "--config", "config.yaml"])

    @configs(RUN_OFTEN)
    def test_runs(self, path: Path) -> None:
        config = made_small(path)
        main(["fit", "--config", "config.yaml"])
        round, identity, history, _, _ = final_checkpoint(Path("runs/version_0"))
        assert (round, identity["method"], identity["clients"]) == (1, config["model"]["class_path"], 2)
        like = yaml.safe_load(path.read_text())["data"]["class_path"]
        metric = "bleu" if like in WRITTEN else "f1" if like == "SQuAD" else BEYOND_CLASSES.get(like, "accuracy")
        assert 0 <= history[-1][f"after/test_{metric}/mean"] <= {"rmse": 3, "perplexity": 1e4}.get(metric, 1)

    @pytest.mark.slow
    @each_config
    def test_runs_alike_on_worker_processes(self, path: Path) -> None:
        made_small(path)
        for engine, run_dir in (("InProcess", "here"), ("Processes", "there")):
            options = ["--federation.engine", engine, "--federation.engine.init_args.threads", "1", "--federation.run_dir", run_dir]
            main(["fit", "--config", "config.yaml", *options])
        assert_same_end(Path("here/version_0"), Path("there/version_0"))
