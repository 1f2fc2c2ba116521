"""What a method was made with is kept in names and numbers, from which it can be made again."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from often import FEW, mostly_slow
from tiny import CLASSES, METHODS, Net, WideNet, data_for, new_data, new_federation, new_method, new_trainer, same

import lightning_fed.methods
from lightning_fed.core.fine_tuning import FineTuning
from lightning_fed.core.hparams import describe
from lightning_fed.engines.compression import Compression
from lightning_fed.errors import FederationError
from lightning_fed.methods import SCAFFOLD, FedAvg, FedDecomp, Standalone
from lightning_fed.options import parameters_of

SILENT = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1}


def choices_of(name: str) -> list[str]:
    """Options of a method whose values are words or numbers of a list."""
    return [option for option, (one, _) in parameters_of(getattr(lightning_fed.methods, name)).items() if is_choice(one.annotation)]


def is_choice(hint: Any) -> bool:
    return get_origin(hint) is Literal or (type(None) in get_args(hint) and any(map(is_choice, get_args(hint))))


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in METHODS for option in choices_of(name)])
def test_a_choice_that_there_is_not_is_refused_in_python_too(name: str, option: str) -> None:
    with pytest.raises(FederationError, match=f"^{name} got {option}='tpyo': give one of "):
        new_method(name, **{option: "tpyo"})


def test_every_method_has_choices_and_the_settings_around_it_have_some() -> None:
    assert all("lr_interval" in choices_of(name) for name in METHODS)
    assert {"weighting", "option"} <= set(choices_of("SCAFFOLD"))
    for make in (partial(FineTuning, when="never"), partial(Compression, up="gzip")):
        with pytest.raises(FederationError, match="give one of"):
            make()
    assert new_method("SCAFFOLD", option="I", weighting=None)


def test_choices_are_checked_where_they_are_declared() -> None:
    """An own method may pass them on, have others of the same name, and put an object in the place of a word."""

    class Mine(SCAFFOLD):
        def __init__(
            self, backbone: Any, option: Literal["first", "third"], kind: Literal["a"] | None = None, **kwargs: Any
        ) -> None:
            kind = kind or print  # type: ignore[assignment]
            super().__init__(backbone, CLASSES, option={"first": "I", "third": "III"}[option], **kwargs)  # type: ignore[arg-type]

    assert Mine(Net, "first").option == "I"
    for given, said in (({"option": "second"}, "option='second'"), ({"option": "third"}, "option='III'")):
        with pytest.raises((FederationError, KeyError), match=said if "III" in said else "second"):
            Mine(Net, **given)  # type: ignore[arg-type]
    with pytest.raises(FederationError, match="Mine got task='segmentation': give one of multiclass, binary,"):
        Mine(Net, "first", task="segmentation")


@pytest.mark.parametrize("annotation", ["NoSuchType", "torch.nope", "list[int] | 'Foo'", "N H W"])
def test_types_that_are_none_do_not_prevent_a_method(annotation: str) -> None:
    class Mine(FedAvg):
        def __init__(self, backbone: Any, kind: Literal["a", "b"] = "a") -> None:
            super().__init__(backbone)

    Mine.__init__.__annotations__["backbone"] = annotation
    assert Mine(Net, "c").hparams["kind"] == "c"  # type: ignore[arg-type]


def test_names_and_numbers() -> None:
    plain, lost = describe(
        {
            "rank": 4,
            "ratios": (1.0, 0.5),
            "rate": np.float64(0.1),
            "folder": Path("runs"),
            "optimizer": partial(torch.optim.SGD, lr=0.1),
            "backbone": [Net, partial(Net, hidden=3)],
            "loss": torch.nn.functional.cross_entropy,
            "function": lambda x: x,
            "network": Net(),
        }
    )
    assert plain == {
        "rank": 4,
        "ratios": [1.0, 0.5],
        "rate": 0.1,
        "folder": "runs",
        "optimizer": {"class_path": "torch.optim.sgd.SGD", "init_args": {"lr": 0.1}},
        "backbone": [{"class_path": f"{Net.__module__}.Net"}, {"class_path": f"{Net.__module__}.Net", "init_args": {"hidden": 3}}],
        "loss": "torch.nn.functional.cross_entropy",
    }
    assert lost == ["function", "network"]
    assert type(plain["rate"]) is float


def test_numbers_of_numpy_do_not_keep_a_checkpoint_from_being_loaded(tmp_path: Path) -> None:
    module = FedAvg(Net, 4, partial(torch.optim.SGD, lr=np.float64(0.1)), epochs=np.int64(1))
    data = new_data(2, 40)
    trainer = new_trainer(max_epochs=1, logger=False, limit_train_batches=2, **SILENT)
    trainer.fit(module, datamodule=data.client(0))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    assert same(FedAvg.load_from_checkpoint(tmp_path / "trained.ckpt", weights_only=True).state_dict(), module.state_dict())
    federation = new_federation(1, tmp_path)
    federation.fit(module.unbuilt_copy(), data)
    assert json.loads((tmp_path / "version_0" / "run.json").read_text())["training"] == [{"phase": "local", "epochs": 1}]


@pytest.mark.parametrize("name", mostly_slow(METHODS, FEW))
def test_a_checkpoint_is_enough_to_load_a_method(name: str, tmp_path: Path) -> None:
    module, data = new_method(name), data_for(name, num_clients=2, size=40)
    trainer = new_trainer(max_epochs=1, logger=CSVLogger(tmp_path), limit_train_batches=2, **SILENT)
    trainer.fit(module, datamodule=data.client(0))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    kind = getattr(lightning_fed.methods, name)
    loaded = kind.load_from_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    assert type(loaded) is kind
    assert same(loaded.state_dict(), module.state_dict())
    before, after = (optimizer.configure_optimizers()[0].defaults for optimizer in (module, loaded))
    assert before == after
    [written] = tmp_path.rglob("hparams.yaml")
    assert "!!" not in written.read_text()
    assert yaml.safe_load(written.read_text()).keys() == module.hparams.keys()


def test_what_is_given_again_counts(tmp_path: Path) -> None:
    path = checkpoint(FedAvg(Net, 4, epochs=2), tmp_path)
    assert FedAvg.load_from_checkpoint(path).epochs == 2
    assert FedAvg.load_from_checkpoint(path, epochs=5).epochs == 5
    assert (
        FedAvg.load_from_checkpoint(path, optimizer=partial(torch.optim.SGD, lr=0.5)).optimizer([torch.ones(1)]).defaults["lr"]
        == 0.5
    )


def test_what_has_no_name_is_asked_for(tmp_path: Path) -> None:
    path = checkpoint(Standalone(lambda classes: Net(classes), 4), tmp_path)
    with pytest.raises(FederationError, match=r"which backbone had not: give it again, as in Standalone"):
        Standalone.load_from_checkpoint(path)
    assert isinstance(Standalone.load_from_checkpoint(path, backbone=Net).backbone, Net)
    with pytest.raises(RuntimeError, match="size mismatch"):  # not what was asked for, but not for want of a name
        Standalone.load_from_checkpoint(path, backbone=WideNet)


class OwnSettings(FedDecomp):
    """Whose constructor takes other arguments than its base's."""

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__(Net, 4, lora_epochs=1, global_epochs=1)
        self.strength = strength


def test_of_a_subclass_its_own_arguments_are_kept(tmp_path: Path) -> None:
    module = OwnSettings(strength=3.0)
    assert {name: value for name, value in module.hparams.items() if name[0] != "_"} == {"strength": 3.0}
    assert OwnSettings.load_from_checkpoint(checkpoint(module, tmp_path)).strength == 3.0


def checkpoint(module: Any, folder: Path) -> Path:
    trainer = new_trainer(max_epochs=1, logger=False, limit_train_batches=1, limit_val_batches=0, **SILENT)
    trainer.fit(module, datamodule=new_data(2, 40).client(0))
    trainer.save_checkpoint(folder / "trained.ckpt")
    return folder / "trained.ckpt"
