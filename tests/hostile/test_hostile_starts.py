"""Whatever a configuration says: a run that plays, or one line that names the option, exit code 2, and nothing left behind."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hostile.corpus import MLP, VIT, Bases, Start, of, starts
from hostile.judge import fault
from lightning.pytorch.callbacks.timer import Interval

HUGE = 10**30
M = "--model.init_args."
D = "--data.init_args.partition"


def network(block: dict[str, Any]) -> str:
    return f"{M}backbone={json.dumps(block)}"


def settings(**changed: Any) -> str:
    return network(of("VisionTransformer", config=VIT["init_args"]["config"] | changed))


@pytest.mark.often(10)
@pytest.mark.parametrize(
    ("method", "args", "names"),
    [
        ("Ditto", [f"{M}personal_optimizer={json.dumps(of('torch.optim.SGD', lr=-1))}"], ["personal_optimizer"]),
        ("FedAvg", [f"{M}optimizer=torch.optim.AdamW", f"{M}optimizer.init_args.betas=-1"], ["betas"]),
        ("FedAvg", [f"{M}optimizer=torch.optim.AdamW", f"{M}optimizer.init_args.betas=[0,1,2]"], ["betas"]),
        ("FedAvg", [f"{D}={json.dumps(of('NWayKShot', ways=[2, 2], shots=[9, 9]))}", f"{D}.init_args.ways=foo"], ["ways"]),
        ("FedAdam", [f"{M}tau={HUGE}"], ["tau"]),
        ("FedAvg", [f"{M}lr_scheduler={json.dumps(of('torch.optim.lr_scheduler.StepLR', step_size='a'))}"], ["lr_scheduler"]),
        ("FedAvg", ["--federation.logger=null"], ["logger"]),
        ("FedAvg", ["--federation.callbacks=lightning_fed.callbacks.Summary"], ["callbacks"]),
        ("FedAvg", ["--trainer.callbacks+=SpikeDetection"], ["callbacks"]),
        ("FedAvg", [f"--data.init_args.eval_batch_size={HUGE}"], ["eval_batch_size"]),
        ("FedAvg", ["--data.init_args.image_size=10000000"], ["image_size"]),
        ("FedAvg", [f"{M}epochs={HUGE}"], ["epochs"]),
        ("FedAvg", [network(MLP | {"init_args": {"inputs": 192, "width": 1e30}})], ["width"]),
        ("FedAvg", [network(of("TextTransformer", width=10, heads=4))], ["heads"]),
        ("FedHM", [network(VIT), f'{M}layers=["network.vit.layernorm"]'], ["layers"]),
        ("FedAvg", [settings(hidden_siz=8)], ["hidden_siz"]),
        ("FedAvg", [settings(hidden_size=0)], ["hidden_size"]),
        ("FedAvg", [settings(hidden_act="foo")], ["hidden_act"]),
        ("FedAvg", [settings(num_attention_heads=0)], ["num_attention_heads"]),
        ("FedAvg", [settings(num_attention_heads=-1)], ["num_attention_heads"]),
        ("FedAvg", [settings(num_hidden_layers=HUGE)], ["num_hidden_layers"]),
        ("FedAvg", [settings(patch_size=100)], ["patch_size"]),
        ("FedAvg", [settings(num_labels=7)], ["num_labels"]),
        ("FedAvg", [settings(model_type="vitt")], ["model_type"]),
        ("AdapterTuning", [f"{M}hidden=[]"], ["hidden"]),
        ("FedDecomp", [f"{M}rank_ratio_linear=2"], ["rank_ratio_linear"]),
        ("FedProx", [f"{M}mu={HUGE}", f"{M}epochs=3"], ["mu"]),
        ("FedAvg", ["--federation.init_from=nowhere"], ["init_from"]),
    ],
)
def test_a_few(method: str, args: list[str], names: list[str], tmp_path: Path) -> None:
    assert fault(Start(Bases(tmp_path).method(method), tuple(args), tuple(names))) == ""


class Idle(L.Callback):
    """Does nothing, at some time."""

    def __init__(self, interval: Interval = Interval.step) -> None:
        self.interval = interval


@pytest.mark.parametrize("option", ["--trainer.callbacks=", "--trainer.callbacks+="])
def test_a_callback_whose_default_is_of_an_enumeration(option: str, tmp_path: Path) -> None:
    assert fault(Start(Bases(tmp_path).method("FedAvg"), (f"{option}{__name__}.Idle",))) == ""
    assert "interval: step" in Path("runs/version_0/config.yaml").read_text()


@pytest.mark.slow
def test_all(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for start in starts(tmp_path):
        with subtests.test(str(start)):
            assert fault(start) == ""
