"""Statistics of batch norm that are gathered in one pass."""

import pytest
import torch
from tiny import NoisyNet, new_data, new_trainer
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.models import ResNet8
from lightning_fed.nn import StatisticsPass, running_statistics

X = torch.randn(23, 6, generator=torch.Generator().manual_seed(3)) * torch.arange(1, 7) + 5


def run(module: nn.Module, x: Tensor = X, batch_size: int = 1000) -> list[int]:
    """One pass; returns the sizes of the batches."""
    return new_trainer(**QUIET).predict(StatisticsPass(module), DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size))


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.BatchNorm1d(3))


def test_one_batch_gives_the_mean_and_the_unbiased_variance() -> None:
    norm = nn.BatchNorm1d(6)
    assert run(norm) == [23]
    torch.testing.assert_close(norm.running_mean, X.mean(dim=0))
    torch.testing.assert_close(norm.running_var, X.var(dim=0, unbiased=True))
    assert norm.num_batches_tracked == 1


def test_of_images_every_pixel_counts() -> None:
    images = torch.randn(5, 3, 4, 4) + torch.arange(3).view(3, 1, 1)
    norm = nn.BatchNorm2d(3)
    run(norm, images)
    torch.testing.assert_close(norm.running_mean, images.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(norm.running_var, images.transpose(0, 1).flatten(1).var(dim=1))


def test_later_layers_see_what_the_batchs_own_statistics_normalized() -> None:
    module = deep()
    run(module)
    x = module[3](torch.relu(batch_norm(module[0](X), None, None, module[1].weight, module[1].bias, training=True)))
    torch.testing.assert_close(module[4].running_mean, x.mean(dim=0))
    torch.testing.assert_close(module[4].running_var, x.var(dim=0))


def test_several_batches_count_the_same_whatever_their_sizes() -> None:
    norm = nn.BatchNorm1d(6)
    assert run(norm, batch_size=9) == [9, 9, 5]
    batches = torch.split(X, 9)
    torch.testing.assert_close(norm.running_mean, torch.stack([batch.mean(dim=0) for batch in batches]).mean(dim=0))
    torch.testing.assert_close(norm.running_var, torch.stack([batch.var(dim=0) for batch in batches]).mean(dim=0))
    assert norm.num_batches_tracked == 3
    assert not torch.allclose(norm.running_mean, X.mean(dim=0), rtol=1e-3)
    assert not torch.allclose(norm.running_var, X.var(dim=0), rtol=1e-3)


def test_a_pass_starts_from_nothing() -> None:
    module = deep()
    run(module, batch_size=9)
    once = {name: module.state_dict()[name].clone() for name in running_statistics(module)}
    for name in once:
        module.state_dict()[name].fill_(77)
    run(module, batch_size=9)
    for name, tensor in once.items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_dropout_stays_off() -> None:
    norm = nn.BatchNorm1d(6)
    run(nn.Sequential(nn.Dropout(0.5), norm).train())
    torch.testing.assert_close(norm.running_mean, X.mean(dim=0))
    torch.testing.assert_close(norm.running_var, X.var(dim=0))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_afterwards_all_is_as_before_but_for_the_statistics(momentum: float | None, training: bool) -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Dropout()).train(training)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run(module, batch_size=9)
    assert module[1].momentum == momentum
    assert all(layer.training == training for layer in module.modules())
    changed = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == running_statistics(module)


def test_names_of_statistics() -> None:
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    assert running_statistics(nn.BatchNorm1d(2)) == set(buffers)
    assert running_statistics(nn.Sequential(nn.Sequential(nn.BatchNorm3d(2)), nn.LayerNorm(2))) == {f"0.0.{b}" for b in buffers}
    assert running_statistics(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2))) == set()
    norms = ["stem.1", *(f"stages.{stage}.bn{k}" for stage in range(3) for k in (1, 2))]
    norms += ["stages.1.downsample.1", "stages.2.downsample.1"]
    model = ResNet8(width=0.1)
    assert running_statistics(model) == {f"{norm}.{buffer}" for norm in norms for buffer in buffers}
    assert running_statistics(model) == dict(model.named_buffers()).keys()


def test_a_last_batch_of_one_example_joins_the_one_before() -> None:
    data = new_data(num_clients=1, size=61, batch_size=16).client(0)
    assert data.info.num_train == 49
    batches = new_trainer(**QUIET).predict(StatisticsPass(NoisyNet()), datamodule=data)
    assert batches == [16, 16, 17]
    assert [len(y) for _, y in data.train_dataloader()] == [16, 16, 17]


def test_all_training_examples_are_seen_in_order() -> None:
    data = new_data(num_clients=2, size=60, batch_size=16).client(1)
    x, y = (torch.cat(parts) for parts in zip(*data.predict_dataloader(), strict=True))
    images, labels = data.data[data.splits[0]]
    assert torch.equal(x, images)
    assert torch.equal(y, labels)
