"""FedRolex: narrower versions of a network whose window rolls over the channels."""

from typing import Any

import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, same, sgd
from tiny_rounds import at_start, fit, two_classes_each
from torch import Tensor

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.methods import FedRolex, HeteroFL
from lightning_fed.models import CNN1, CNN2, CNN3, CNN4, CNN5, ResNet8

CLIENTS = [ClientInfo(k, 10, 0, 0, (1,) * CLASSES) for k in range(3)]
HIDDEN, FEATURES = 5, 6
"""Channels of the two hidden layers of :class:`Net`."""


class EighthOfResNet8(ResNet8):
    """8, 16 and 32 channels."""

    def __init__(self, num_classes: int = CLASSES, width: float = 1.0) -> None:
        super().__init__(num_classes, width / 8)


def server_of(method: FederatedModule, t: int = 1) -> Any:
    return at_start(method, CLIENTS, t)


def window(channels: int, width: float, t: int) -> list[int]:
    """Which channels a client has in round t, counted from 1."""
    return [(t - 1 + i) % channels for i in range(max(1, round(width * channels)))]


def test_the_first_round_is_that_of_heterofl() -> None:
    ours, theirs = (
        fit(method(NoisyNet, CLASSES, widths=[1.0, 0.6, 0.4], optimizer=sgd), two_classes_each()).run.server.state_dict()
        for method in (FedRolex, HeteroFL)
    )
    assert same(ours, theirs)


@pytest.mark.parametrize("t", [1, 2, 4, 5, 6, 7, 31, 100])
@pytest.mark.parametrize("width", [0.6, 0.4])
def test_the_window_starts_at_the_round_and_wraps_around(t: int, width: float) -> None:
    server = server_of(FedRolex(NoisyNet, CLASSES, widths=[1.0, width]), t)
    hidden, features = window(HIDDEN, width, t), window(FEATURES, width, t)
    state, version = server.state, server.version(width)
    expected = {
        "backbone.fc1.weight": state["backbone.fc1.weight"][hidden],
        "backbone.fc1.bias": state["backbone.fc1.bias"][hidden],
        "backbone.fc2.weight": state["backbone.fc2.weight"][features][:, hidden],
        "backbone.fc2.bias": state["backbone.fc2.bias"][features],
        "backbone.norm.weight": state["backbone.norm.weight"][features],
        "backbone.norm.bias": state["backbone.norm.bias"][features],
        "backbone.head.weight": state["backbone.head.weight"][:, features],
        "backbone.head.bias": state["backbone.head.bias"],
    }
    assert same(version, expected)
    assert server.version(None) is state


@pytest.mark.parametrize("network", [NoisyNet, EighthOfResNet8, CNN5])
def test_without_learning_windows_that_wrap_put_back_what_they_took(network: Any) -> None:
    method = FedRolex(network, CLASSES, widths=[1.0, 0.6, 0.4])
    initial = {name: tensor.clone() for name, tensor in server_of(method).state.items()}
    for t in (4, 5, 8, 13, 30):
        server = server_of(method, t)
        server.load_state_dict(dict(initial))
        server.aggregate([ClientUpdate(client.id, 1, server.broadcast(client).state) for client in CLIENTS])
        assert same(server.state, initial)


def scatter(name: str, tensor: Tensor, like: Tensor, width: float, t: int) -> tuple[Tensor, Tensor]:
    """An update of :class:`Net` where it belongs in the whole, and which entries it covers."""
    sets = {"fc1": (HIDDEN, None), "fc2": (FEATURES, HIDDEN), "head": (None, FEATURES)}[name.split(".")[1]]
    hidden = [k is not None and width < 1 for k in sets]
    index = [window(k, width, t) if h else range(size) for k, h, size in zip(sets, hidden, like.shape, strict=False)]
    value, covered = torch.zeros_like(like), torch.zeros_like(like)
    grid = torch.meshgrid(*map(torch.tensor, index), indexing="ij")
    value[grid], covered[grid] = tensor, 1.0
    return value, covered


@pytest.mark.parametrize("t", [1, 5, 6, 12])
def test_each_entry_is_averaged_over_those_whose_window_has_it(t: int) -> None:
    widths = [1.0, 0.6, 0.4]
    server = server_of(FedRolex(Net, CLASSES, widths=widths, masked=False), t)
    before = {name: tensor.clone() for name, tensor in server.state.items()}
    for cohort in ([0, 1, 2], [1, 2], [2]):
        server.load_state_dict(dict(before))
        updates = [
            ClientUpdate(k, 1, {name: torch.randn_like(tensor) for name, tensor in server.broadcast(CLIENTS[k]).state.items()})
            for k in cohort
        ]
        server.aggregate(updates)
        for name, old in before.items():
            parts = [scatter(name, update.state[name], old, widths[update.client], t) for update in updates]
            total, count = (sum(part[which] for part in parts) for which in (0, 1))
            expected = torch.where(count > 0, total / count, old)
            torch.testing.assert_close(server.state[name], expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(server.state[name][count == 0], old[count == 0])


@pytest.mark.parametrize("t", [1, 6, 7, 20, 30])
def test_the_two_branches_of_a_residual_block_have_the_same_channels(t: int) -> None:
    """Channels carry their number, kernels 100 times that of their output plus that of their input."""
    server = server_of(FedRolex(EighthOfResNet8, CLASSES, widths=[1.0, 0.5]), t)
    for name, tensor in server.state.items():
        numbers = torch.arange(len(tensor)).float()
        if tensor.dim() == 4:
            numbers = (100 * numbers[:, None] + torch.arange(tensor.shape[1]))[..., None, None]
        server.state[name] = numbers.expand_as(tensor).clone() if tensor.dim() != 2 else tensor
    version = {name.removeprefix("backbone."): tensor for name, tensor in server.version(0.5).items()}

    def channels(norm: str) -> list[int]:
        return version[f"{norm}.weight"].int().tolist()

    def kernels(conv: str, outputs: list[int], inputs: list[int]) -> None:
        expected = torch.tensor([[100 * o + i for i in inputs] for o in outputs])
        assert (version[f"{conv}.weight"] == expected[..., None, None]).all()

    inputs = channels("stem.1")
    kernels("stem.0", inputs, [0, 1, 2])
    for stage in range(3):
        block = f"stages.{stage}"
        outputs = channels(f"{block}.bn2")
        assert outputs == window(8 * 2**stage, 0.5, t)
        kernels(f"{block}.conv1", channels(f"{block}.bn1"), inputs)
        kernels(f"{block}.conv2", outputs, channels(f"{block}.bn1"))
        if stage:
            assert channels(f"{block}.downsample.1") == outputs
            kernels(f"{block}.downsample.0", outputs, inputs)
        else:
            assert inputs == outputs
        inputs = outputs


@pytest.mark.parametrize("network", [CNN1, CNN2, CNN3, CNN4, CNN5])
def test_a_flattened_channel_rolls_with_all_its_pixels(network: Any) -> None:
    """A window of a network is the network of those channels: what the first linear layer gets of a channel are its own weights."""
    t, width = 4, 0.5
    server = server_of(FedRolex(network, CLASSES, widths=[1.0, width]), t)
    version = server.version(width)
    whole = {name.removeprefix("backbone."): tensor for name, tensor in server.state.items()}
    layers = ("conv1", "conv2", "fc1", "fc2", "head")
    inputs = [0, 1, 2]
    for layer in layers:
        weight = whole[f"{layer}.weight"]
        outputs = list(range(CLASSES)) if layer == "head" else window(len(weight), width, t)
        if layer == "fc1":  # 5 × 5 pixels of each filter
            inputs = [25 * channel + pixel for channel in inputs for pixel in range(25)]
        assert torch.equal(version[f"backbone.{layer}.weight"], weight[outputs][:, inputs])
        assert torch.equal(version[f"backbone.{layer}.bias"], whole[f"{layer}.bias"][outputs])
        inputs = outputs
