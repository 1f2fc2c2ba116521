"""HeteroFL: narrower versions of a network."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, NoisyNet, Recording, StillNet, momentum, new_data, same, sgd, tiny_vit
from tiny_rounds import UniformFedAvg, fit, two_classes_each
from torch import nn
from torch.nn.functional import batch_norm

from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.methods import HeteroFL
from lightning_fed.methods.heterofl import narrowed
from lightning_fed.models import ResNet8, ResNet18, ResNet34
from lightning_fed.tensors import count_floats


class NormFreeResNet(ResNet8):
    """With an identity in place of each batch norm, an eighth as wide."""

    def __init__(self, num_classes: int = CLASSES, width: float = 1.0) -> None:
        super().__init__(num_classes, width / 8)
        for name, layer in list(self.named_modules()):
            if isinstance(layer, nn.BatchNorm2d):
                self.set_submodule(name, nn.Identity())


CLIENT = ClientInfo(0, 10, 0, 0, (1,) * CLASSES)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("network", mostly_slow([Net, NoisyNet], often={NoisyNet}))
def test_in_full_width_everywhere_it_is_unweighted_fedavg(network: Any, masked: bool) -> None:
    data = new_data(3, 240)
    assert all(min(client.label_counts) > 0 for client in data.clients)
    ours = fit(HeteroFL(network, CLASSES, widths=[1.0], masked=masked, optimizer=momentum), data, rounds=2)
    theirs = fit(UniformFedAvg(network, CLASSES, momentum), data, rounds=2).run.server.state_dict()
    state = ours.run.server.state_dict()
    assert same(state, {name: tensor for name, tensor in theirs.items() if name in state})
    assert theirs.keys() - state.keys() == ours.run.model.recomputed_buffers()


@pytest.mark.often(2)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("widths", [(1.0, 0.6, 0.4), (0.6, 0.4)])
def test_each_entry_is_averaged_over_those_who_have_it(widths: tuple[float, ...], masked: bool) -> None:
    """Entry by entry, by hand. Without a client of full width, the rim keeps its values."""
    engine, data = Recording(), two_classes_each()
    federation = fit(HeteroFL(NoisyNet, CLASSES, widths=widths, masked=masked, optimizer=sgd), data, engine=engine)
    before, after = federation.run.model.shared_state(), federation.run.server.state_dict()
    assert len(engine.trained) == 3
    kept = 0
    for name, old in before.items():
        for index in torch.cartesian_prod(*map(torch.arange, old.shape)).view(-1, old.dim()).tolist():
            values = [
                update.state[name][tuple(index)].item()
                for update in engine.trained
                if all(i < size for i, size in zip(index, update.state[name].shape, strict=True))
                and not (masked and ".head." in name and data.clients[update.client].label_counts[index[0]] == 0)
            ]
            found, was = after[name][tuple(index)].item(), old[tuple(index)].item()
            assert found == (pytest.approx(sum(values) / len(values), abs=1e-6) if values else was)
            kept += not values and ".head." not in name
    assert (kept > 0) == (1.0 not in widths)
    assert not torch.equal(before["backbone.fc1.weight"][:2], after["backbone.fc1.weight"][:2])


@pytest.mark.parametrize("network", [Net, NormFreeResNet])
def test_a_narrow_network_is_the_global_one_without_the_other_channels(network: Any) -> None:
    x = torch.randn(3, 3, 4, 4) if network is Net else torch.randn(3, 3, 32, 32)
    method = HeteroFL(network, CLASSES, widths=[1.0, 0.6], scaler=False)
    whole, part = (method.for_client(replace(CLIENT, model_size=width)).eval() for width in (None, 0.6))
    method.configure_model()
    shapes = method.shapes(0.6)
    state = {name: tensor + 0.1 for name, tensor in whole.shared_state().items()}
    part.load_shared_state(narrowed(state, shapes))
    cut = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for name, tensor in narrowed(cut, shapes).items():
        tensor.copy_(narrowed(state, shapes)[name])
    whole.load_shared_state(cut)
    assert sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in whole.parameters()) * 0.7
    torch.testing.assert_close(part(x), whole(x), rtol=1e-4, atol=1e-4)
    assert part(x).std() > 1e-3


@pytest.mark.parametrize(("scaler", "factor"), [(True, 1 / 0.6), (False, 1.0)])
def test_the_scaler_divides_by_the_width_in_training_only(scaler: bool, factor: float) -> None:
    """Batch norm undoes it in training but for its epsilon, which is as large as the variance here."""
    x = torch.randn(16, 3, 4, 4)
    module = HeteroFL(StillNet, CLASSES, widths=[0.6], scaler=scaler).for_client(replace(CLIENT, model_size=0.6))
    features, norm = Net.encode(module.backbone, x), module.backbone.norm
    norm.eps = 1e-2
    torch.testing.assert_close(module.eval().backbone.encode(x), features / (1 + 1e-2) ** 0.5)
    expected = batch_norm(factor * features, None, None, training=True, eps=1e-2)
    torch.testing.assert_close(module.train().backbone.encode(x), expected)


@pytest.mark.often(2)
@pytest.mark.parametrize("scaler", [True, False])
@pytest.mark.parametrize("version", ["global", "width_0.6"])
def test_in_evaluation_activations_are_normalized_by_their_own_statistics(version: str, scaler: bool) -> None:
    """One client, one batch: but for the unbiased variance, a measured network computes what it does in training."""
    data = new_data(1, 120, batch_size=1000)
    federation = fit(HeteroFL(StillNet, CLASSES, widths=[0.6, 1.0], scaler=scaler, optimizer=sgd), data)
    model = federation.run.server.global_models()[version]
    module = federation.run.model.for_client(replace(CLIENT, model_size=model.model_size)).eval()
    module.load_shared_state(model.state)
    module.load_statistics(model.statistics)
    [(x, _)] = data.client(0).predict_dataloader()
    norm = module.backbone.norm
    expected = batch_norm(Net.encode(module.backbone, x), None, None, norm.weight, norm.bias, training=True)
    torch.testing.assert_close(module.backbone.encode(x), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("network", "classes", "sizes"),
    [
        (ResNet18, 10, {1: (11_173_962, 11.17), 0.62: (None, 4.29), 0.5: (None, 2.80), 0.35: (1_373_160, 1.37)}),
        (ResNet34, 100, {1: (21_328_292, 21.33), 0.64: (None, 8.77), 0.5: (None, 5.35), 0.4: (3_423_974, 3.42)}),
    ],
)
def test_payloads_have_the_sizes_of_table_2(network: Any, classes: int, sizes: dict[float, tuple[int | None, float]]) -> None:
    with torch.device("meta"):
        method = HeteroFL(network, classes, widths=list(sizes))
        method.configure_model()
    state = {name: tensor for name, tensor in method.state_dict().items() if name in method.shared_names()}
    for width, (exactly, millions) in sizes.items():
        count = count_floats(narrowed(state, method.shapes(width)))
        assert round(count / 1e6, 2) == millions
        assert exactly in (None, count)


def test_the_server_sends_leading_channels_of_the_right_shape() -> None:
    method = HeteroFL(NormFreeResNet, CLASSES, widths=[1.0, 0.5])
    method.configure_model()
    server = method.configure_server([replace(CLIENT, id=k) for k in range(4)])
    whole, narrow = (server.broadcast(replace(CLIENT, id=k)) for k in (2, 3))
    assert (whole.model_size, narrow.model_size) == (None, 0.5)
    assert whole.state is server.state
    assert narrow.state["backbone.stem.0.weight"].shape == (4, 3, 7, 7)
    assert narrow.state["backbone.stages.2.conv1.weight"].shape == (16, 8, 3, 3)
    assert narrow.state["backbone.head.weight"].shape == (CLASSES, 16)
    assert torch.equal(narrow.state["backbone.stages.2.conv1.weight"], server.state["backbone.stages.2.conv1.weight"][:16, :8])


def test_widths_are_relative_to_the_network_that_was_given() -> None:
    method = HeteroFL(partial(Net, width=2.0), CLASSES, widths=[1.0, 0.5])
    method.configure_model()
    server = method.configure_server([replace(CLIENT, id=k) for k in range(2)])
    sizes = [len(server.version(width)["backbone.fc2.bias"]) for width in (None, 0.5)]
    assert sizes == [12, 6]
    assert len(method.for_client(replace(CLIENT, model_size=0.5)).shared_state()["backbone.fc2.bias"]) == 6


def test_a_layer_has_at_least_one_channel() -> None:
    federation = fit(HeteroFL(NoisyNet, CLASSES, widths=[1.0, 0.01], optimizer=sgd))
    shapes = federation.run.model.shapes(0.01)
    assert shapes["backbone.fc2.weight"] == shapes["backbone.fc1.bias"] + (1,) == (1, 1)
    assert shapes["backbone.fc1.weight"] == (1, 48)
    assert shapes["backbone.head.weight"] == (CLASSES, 1)
    assert 0 <= federation.run.history[-1]["width_0.01/test_accuracy"] <= 1


def test_a_network_without_width_is_refused() -> None:
    data = new_data(2, 40)
    with pytest.raises(FederationError, match="HeteroFL needs a backbone that takes a width, as ResNet18 does"):
        fit(HeteroFL(tiny_vit, CLASSES, widths=[1.0, 0.5]), data)


def headless(num_classes: int, width: float = 1.0) -> nn.Module:
    hidden = round(4 * width)
    return nn.Sequential(nn.Conv2d(3, hidden, 4), nn.ReLU(), nn.Conv2d(hidden, num_classes, 1), nn.Flatten())


def test_only_the_mask_needs_a_head() -> None:
    with pytest.raises(FederationError, match="needs the head of the network"):
        fit(HeteroFL(headless, CLASSES, widths=[1, 0.5]))
    assert fit(HeteroFL(headless, CLASSES, widths=[1, 0.5], masked=False)).run.history[-1]["train/local_loss"] > 0
