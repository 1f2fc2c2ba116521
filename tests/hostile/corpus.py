"""Starts that somebody could try and that mostly cannot work, made of every option of every class that a configuration can name."""

import json
import typing
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks as of_lightning
import torch
import yaml
from tiny import ON_IMAGES, ON_TINY_DATA, TINY_TRANSFORMER, TINY_VIT
from tiny_chats import TINY_MODELS, chats, save_chat_tokenizer, write_lines
from tiny_files import write_arrays, write_csv, write_dataset, write_images
from tiny_texts import TINY_GPT2, save_tokenizer, save_word_tokenizer, write_e2e, write_glue, write_squad

import lightning_fed.callbacks
import lightning_fed.data
import lightning_fed.engines
import lightning_fed.methods
import lightning_fed.models
from lightning_fed.cli.refusals import known
from lightning_fed.core import FineTuning, PublicDistillation
from lightning_fed.federation.federation import Federation
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.options import parameters_of

VALUES = {"type": "foo", "sign": -1, "zero": 0, "huge": 10**30, "null": None, "list": [1, 2], "nan": "nan"}
"""What an option is given, by what is wrong with it."""

MISSPELT = "misspelt"


@dataclass(frozen=True)
class Start:
    """A command line, and what its refusal has to name.

    Args:
        config: the configuration's file.
        args: what comes after it.
        names: of which the message has one.
        hint: the type of the option; None: whatever the class says of it counts.
        value: what it is given.
    """

    config: str
    args: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    hint: Any = None
    value: Any = None

    def __str__(self) -> str:
        return " ".join([Path(self.config).stem, *self.args])[:200]


def of(name: str, **options: Any) -> dict[str, Any]:
    """A block of a configuration."""
    return {"class_path": name} | ({"init_args": options} if options else {})


MLP = of("MLP", inputs=192, hidden=[8])
TEXT = of("TextTransformer", vocab_size=50, max_length=8, width=8, heads=2, layers=1)
VIT = of("VisionTransformer", config=TINY_VIT | {"image_size": 8, "patch_size": 4})
CLASSIFIER = of("TransformerClassifier", config=TINY_TRANSFORMER)
CHAT = of("CausalLM", config=TINY_MODELS["llama"], max_new_tokens=2)

ON_TEXTS = {
    "TextTransformer": "AGNews",
    "TransformerClassifier": "TextFiles",
    "TransformerLM": "E2E",
    "TransformerQA": "SQuAD",
    "CausalLM": "Instructions",
}
"""Networks that take no images, and data that they take."""

MADE_OF = {"ShallowResNet", "SmallCNN", "SmallImageResNet", "Wrapped"}
"""Networks that others are made of."""

NETWORKS: dict[str, Any] = {
    **{name: of(name, width=0.05) for name in known("backbone") if name.startswith(("ResNet", "CNN"))},
    "CNN": of("CNN", conv2_filters=2, fc1_width=4),
    "CIFARResNet": of("CIFARResNet", depth=8, width=0.1),
    "TextTransformer": TEXT,
    "VisionTransformer": VIT,
    **{name: of(name, inputs=3072, hidden=[4]) for name in ("MLP", "SoftmaxMLP")},
    "LinearModel": of("LinearModel", inputs=3072),
}

PARTITIONS: dict[str, dict[str, Any]] = {
    "ClassesPerClient": {"classes": 2},
    "DirichletPerClass": {"alpha": 1.0},
    "DirichletPerClient": {"alpha": 1.0, "samples": 20, "test_samples": 20},
    "GivenShares": {"shares": [[0.3] * 10] * 3},
    "NWayKShot": {"ways": [2, 2], "shots": [9, 9]},
    "BySimilarity": {"iid_fraction": 0.5},
    "WholeLabels": {},
    "ByColumn": {"column": "user"},
}

INPUTS = {
    "Digits": 192,
    "DigitAttributes": 192,
    "Diabetes": 10,
    "ArrayFiles": 360,
    "CSVFiles": 2,
    "ImageFolder": 192,
    "HFDataset": 192,
}
"""How many numbers an example has."""

OPTIMIZERS = ("SGD", "AdamW", "RMSprop", "Adagrad", "NAdam")
SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 1},
    "CosineAnnealingLR": {"T_max": 10},
    "ExponentialLR": {"gamma": 0.9},
    "LinearLR": {},
}


# ------------------------------------------------------------------------------------------------ configurations that work


@dataclass(frozen=True)
class Bases:
    """Configurations that work, written into a folder.

    Args:
        folder: where.
    """

    folder: Path

    def write(self, name: str, data: Any, model: Any) -> str:
        """One of them."""
        path = self.folder / f"{name}.yaml"
        federation = {"rounds": 1, "progress": False, "logger": False}
        trainer = {"accelerator": "cpu", **{f"limit_{part}_batches": 1 for part in ("train", "val", "test")}}
        path.write_text(yaml.safe_dump({"data": data, "model": model, "federation": federation, "trainer": trainer}))
        return str(path)

    def method(self, name: str) -> str:
        """A method on data that it can train on."""
        method = getattr(lightning_fed.methods, name)
        own = ON_TINY_DATA.get(name, {}) | ({"input_shape": [3, 8, 8]} if name == "PFedGate" else {})
        if not issubclass(method, AdapterModule):
            public = {"public": of("PublicShare", share=0.1)} if issubclass(method, PublicDistillation) else {}
            return self.write(name, digits(**public), of(name, backbone=MLP, **own))
        if name in ON_IMAGES:
            return self.write(name, digits(), of(name, backbone=VIT, steps=1))
        return self.write(name, self.texts(), of(name, backbone=CLASSIFIER, steps=1))

    def texts(self) -> dict[str, Any]:
        """Texts of two classes."""
        path = self.folder / "texts.csv"
        path.write_text("text,label\n" + "the dog barks,a\nthe cat naps,b\n" * 20)
        tokenizer = save_tokenizer(self.folder / "tokenizer")
        dealt = {"num_clients": 2, "partition": of("IID")}
        return of("TextFiles", path=str(path), classes=["a", "b"], tokenizer=tokenizer, **dealt)

    def data(self) -> dict[str, str]:
        """Data sets, of those that can be written small."""
        folder = self.folder
        (folder / "news").mkdir()
        for part in ("train", "test"):
            (folder / "news" / f"{part}.csv").write_text("".join(f'"{k % 4 + 1}","the dog","barks {k}"\n' for k in range(80)))
        dealt = {"num_clients": 2, "partition": of("IID")}
        texts = {"tokenizer": save_tokenizer(folder / "tokenizer"), **dealt}
        generated = {"tokenizer": save_word_tokenizer(folder / "words"), "metrics": ["bleu"], "num_clients": 2}
        spoken = {"tokenizer": save_chat_tokenizer(folder / "chat_tokenizer"), **dealt}
        columns = {"target": "kind", "input": ["height", "weight"], "client": "user", "num_clients": 2}
        by_user = {"client": "user", "num_clients": 2, "image_size": 8}
        data = {
            "Digits": digits(),
            "DigitAttributes": of("DigitAttributes", num_clients=2, image_size=8),
            "Diabetes": of("Diabetes", num_clients=2),
            "ArrayFiles": of("ArrayFiles", path=write_arrays(folder / "images.npz"), client="user", num_clients=2),
            "CSVFiles": of("CSVFiles", path=write_csv(folder / "table.csv"), **columns),
            "ImageFolder": of("ImageFolder", path=write_images(folder / "images"), layout="user/class", **by_user),
            "HFDataset": of("HFDataset", path=write_dataset(folder / "photos"), input="image", target="label", **by_user),
            "TextFiles": self.texts(),
            "AGNews": of("AGNews", root=str(folder / "news"), max_length=8, vocab_size=50, **dealt),
            "GLUE": of("GLUE", task="sst2", root=write_glue("sst2", folder / "glue"), **texts),
            "SQuAD": of("SQuAD", version="1.1", root=write_squad(folder / "squad"), max_length=12, stride=2, **texts),
            "Instructions": of("Instructions", path=write_lines(folder / "chats.jsonl", chats(4)), test_share=0.3, **spoken),
            "E2E": of("E2E", root=write_e2e(folder / "e2e"), **generated),
        }
        models = {
            "AGNews": of("FedAvg", backbone=TEXT),
            "SQuAD": of("HOMLoRA", backbone=of("TransformerQA", config=TINY_TRANSFORMER), steps=1),
            "E2E": of("HOMLoRA", backbone=of("TransformerLM", config=TINY_GPT2, max_new_tokens=2), steps=1),
            "Instructions": of("HOMLoRA", backbone=CHAT, steps=1),
            **dict.fromkeys(("TextFiles", "GLUE"), of("HOMLoRA", backbone=CLASSIFIER, steps=1)),
            **{name: of("FedAvg", backbone=of("MLP", inputs=count, hidden=[4])) for name, count in INPUTS.items()},
        }
        return {name: self.write(f"data_{name}", block, models[name]) for name, block in data.items()}


def digits(**options: Any) -> dict[str, Any]:
    """Small images for three clients."""
    own = {"num_clients": 3, "image_size": 8, "partition": of("ClassesPerClient", classes=2)}
    return of("Digits", **own | options)


# --------------------------------------------------------------------------------------------------- and those that do not


def starts(folder: Path) -> list[Start]:
    """All of them, in the order of the blocks of a configuration."""
    bases, seen = Bases(folder), set[tuple[Any, str]]()
    found = list[Start]()
    data = bases.data()
    for name, config in data.items():
        found += [Start(config), *of_class(config, "data.init_args", getattr(lightning_fed.data, name), seen)]
    plain = bases.method("FedAvg")
    for name, options in PARTITIONS.items():
        place = "data.init_args.partition"
        config, *more = {
            "DirichletPerClient": (data["AGNews"], "--data.init_args.split=official"),  # its clients share examples
            "ByColumn": (data["ArrayFiles"], "--data.init_args.client=null"),
        }.get(name, (plain,))
        given = (f"--{place}={json.dumps(of(name, **options))}", *more)
        found.append(Start(config, given))
        for start in of_class(config, f"{place}.init_args", getattr(lightning_fed.data, name), seen, given):
            found.append(replace(start, names=(*start.names, "partition")))
    for name in known("model"):
        config, kind = bases.method(name), getattr(lightning_fed.methods, name)
        found += [Start(config), *of_class(config, "model.init_args", kind, seen), of_another(config, kind)]
        if not issubclass(kind, AdapterModule):
            found += of_answering(name, data["E2E"], data["SQuAD"])
    for name in known("backbone"):
        if name not in MADE_OF:
            found += of_network(bases, plain, name, data, seen)
    found += of_class(plain, "model.init_args.fine_tuning", FineTuning, seen)
    found += of_class(plain, "federation", Federation, seen, skip={"seed", "trainer"})
    found += of_class(plain, "trainer", L.Trainer, seen)
    return thinned([*found, *of_optimizers(plain), *of_callbacks(plain), *of_engines(plain, seen), *of_settings(bases)])


def thinned(found: Iterable[Start]) -> list[Start]:
    """Of what a type refuses by itself two with each value, and one that is misspelt; of what only a class can refuse, all."""
    counted: Counter[tuple[str, str]] = Counter()
    left = []
    for start in found:
        kind = (str(start.hint), str(start.value))
        counted[kind] += 1
        if start.hint is None or passes(start.hint, start.value) or counted[kind] <= (1 if start.hint == MISSPELT else 2):
            left.append(start)
    return left


def passes(hint: Any, value: Any) -> bool:
    """Whether a value is a number that a type takes."""
    for kind in (hint, *typing.get_args(hint)):
        if hasattr(kind, "_restrictions"):
            with suppress(ValueError, TypeError):
                kind(value)
                return True
    return False


def of_class(
    config: str, place: str, kind: type, seen: set[tuple[Any, str]], given: Iterable[str] = (), skip: Iterable[str] = ()
) -> Iterator[Start]:
    """Wrong values of the options of a class that no class before it had."""
    for name, (parameter, maker) in parameters_of(kind).items():
        if (maker, name) in seen or name in skip:
            continue
        seen.add((maker, name))
        for what, value in VALUES.items():
            wrong = 7 if what == "list" and "list" in str(parameter.annotation).lower() else value
            yield Start(config, (*given, f"--{place}.{name}={json.dumps(wrong)}"), (name,), parameter.annotation, wrong)
        yield Start(config, (*given, f"--{place}.{name[:-1]}=1"), (name[:-1],), MISSPELT, place)


def of_network(bases: Bases, plain: str, name: str, data: dict[str, str], seen: set[tuple[Any, str]]) -> Iterator[Start]:
    """Wrong values of the options of a network, on data that it takes, and the network on data that it may not take."""
    block = NETWORKS.get(name, of(name))
    images = digits(image_size=32)
    config = data[ON_TEXTS[name]] if name in ON_TEXTS else bases.write(f"network_{name}", images, of("FedAvg", backbone=block))
    yield Start(config)
    yield from of_class(config, "model.init_args.backbone.init_args", getattr(lightning_fed.models, name), seen)
    yield Start(plain, (f"--model.init_args.backbone={json.dumps(block)}",), ("backbone", name))


def of_another(config: str, kind: type) -> Start:
    """An option of another method."""
    own = parameters_of(kind)
    others = (option for other in known("model") for option in parameters_of(getattr(lightning_fed.methods, other)))
    option = next(option for option in others if option not in own)
    return Start(config, (f"--model.init_args.{option}=1",), (option,))


def of_answering(method: str, *configs: str) -> Iterator[Start]:
    """A method with networks that answer with texts and spans, on data of their own."""
    share = (f"--data.init_args.public={json.dumps(of('PublicShare', share=0.2))}",)
    public = share if issubclass(getattr(lightning_fed.methods, method), PublicDistillation) else ()
    for config in configs:
        network = yaml.safe_load(Path(config).read_text())["model"]["init_args"]["backbone"]
        own = ON_TINY_DATA.get(method, {}) | ({"input_shape": [3, 8, 8]} if method == "PFedGate" else {})
        block = json.dumps(of(method, backbone=network, **own))
        yield Start(config, (f"--model={block}", *public), ("backbone", "input_shape", "data", "steps"))


def of_optimizers(config: str) -> Iterator[Start]:
    """Wrong values of the options of optimizers and schedules."""
    seen: set[tuple[Any, str]] = set()
    for name in OPTIMIZERS:
        given = (f"--model.init_args.optimizer=torch.optim.{name}",)
        kind = getattr(torch.optim, name)
        for start in of_class(config, "model.init_args.optimizer.init_args", kind, seen, given, {"params"}):
            yield replace(start, names=(*start.names, "optimizer"))
    for name, options in SCHEDULES.items():
        given = (f"--model.init_args.lr_scheduler={json.dumps(of(f'torch.optim.lr_scheduler.{name}', **options))}",)
        kind = getattr(torch.optim.lr_scheduler, name)
        for start in of_class(config, "model.init_args.lr_scheduler.init_args", kind, seen, given, {"optimizer"}):
            yield replace(start, names=(*start.names, "lr_scheduler"))


def of_callbacks(config: str) -> Iterator[Start]:
    """Callbacks where they do not belong, in a list and not."""
    own = [f"lightning_fed.callbacks.{name}" for name in lightning_fed.callbacks.__all__]
    for name in (*of_lightning.__all__, *own):
        for option in ("trainer.callbacks=", "trainer.callbacks+=", "federation.callbacks=", "federation.callbacks+="):
            yield Start(config, (f"--{option}{name}",), ("callbacks",))


def of_engines(config: str, seen: set[tuple[Any, str]]) -> Iterator[Start]:
    """Wrong values of the options of engines."""
    for name in ("InProcess", "Processes"):
        given = (f"--federation.engine={name}",)
        yield from of_class(config, "federation.engine.init_args", getattr(lightning_fed.engines, name), seen, given)


def of_settings(bases: Bases) -> Iterator[Start]:
    """Wrong settings of networks of the transformers library."""
    for method, block in (("FedAvg", VIT), ("HOMLoRA", CLASSIFIER)):
        config, sizes = bases.method(method), block["init_args"]["config"]
        for name in sizes:
            for changed in (*({name: value} for value in VALUES.values()), {name[:-1]: 2}):
                given = json.dumps(of(block["class_path"], config=sizes | changed))
                yield Start(config, (f"--model.init_args.backbone={given}",), (name, *changed))
