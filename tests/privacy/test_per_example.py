"""A step of DP-SGD: how far one example moves it, how well it is hidden, and on which batches it is taken."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import CLASSES, Net, new_method, same, sgd, text_batches
from torch import Tensor, nn

from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import PhasedModule
from lightning_fed.data.batches import PoissonBatches
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.privacy.per_example import PrivateGradients
from lightning_fed.tensors import State

CLIP = 0.3


class GroupNormed(nn.Sequential):
    """A convolution, group norm, and a head, which see no other example."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, num_classes))


def begun(module: Any) -> Any:
    """A method in its first phase, as in a fit."""
    module.configure_model()
    module._trainer = SimpleNamespace(precision="32-true")
    module.manual_backward = Tensor.backward
    module.phase = module.phases()[0]
    return module


def silent(name: str, count: int) -> Tensor:
    return torch.zeros(count)


def gradients(module: PhasedModule, batch: Any, **options: Any) -> State:
    """What a step has as gradients."""
    private = PrivateGradients(**{"clip": CLIP, "multiplier": 0.0, "batch_size": 1, "normals": silent, **options})
    private(module, batch)
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def norm(state: State) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in state.values()))


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 4, 4, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


@pytest.mark.parametrize("per_example", ["vmap", "loop"])
@pytest.mark.parametrize("backbone", [Net, GroupNormed])
def test_the_gradients_are_those_of_the_formula(backbone: Any, per_example: Any) -> None:
    """Computed by hand: each example's own, scaled down, summed, divided by the expected size; whatever the size of a chunk."""
    module, (x, y) = begun(FedAvg(backbone, CLASSES, optimizer=sgd)), images(7)
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    clipped = 0
    for k in range(7):
        module.zero_grad()
        nn.functional.cross_entropy(module(x[k : k + 1]), y[k : k + 1]).backward()
        own = {name: p.grad for name, p in module.named_parameters()}
        clipped += norm(own) > CLIP
        for name in expected:
            expected[name] += own[name] * min(1.0, CLIP / norm(own)) / 5
    assert clipped
    found = gradients(module, (x, y), batch_size=5, per_example=per_example, chunk=3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_of_an_adapter_on_a_transformer_all_that_learns_has_gradients_and_nothing_else() -> None:
    module = begun(new_method("HOMLoRA"))
    [batch] = text_batches(1)
    found = gradients(module, batch, per_example="loop")
    assert found.keys() == {name for name, p in module.named_parameters() if p.requires_grad}
    assert 0 < norm(found) <= CLIP * len(batch[1]) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_one_example_moves_a_sum_by_no_more_than_the_clip_norm(seed: int) -> None:
    """Whatever it is, and whatever the others are."""
    rng = np.random.default_rng(seed)
    module, (x, y) = begun(FedAvg(GroupNormed, CLASSES, optimizer=sgd)), images(int(rng.integers(1, 9)), seed)
    x = x * float(rng.choice([0.0, 1e-3, 1.0, 1e6]))
    with_it, without = gradients(module, (x, y)), gradients(module, (x[:-1], y[:-1]))
    assert norm({name: tensor - without[name] for name, tensor in with_it.items()}) <= CLIP * (1 + 1e-5)


def test_noise_is_of_the_clip_norm_and_new_in_each_step() -> None:
    """A hundred thousand numbers: half the noise, or that of a mean, would be found."""
    module = begun(FedAvg(lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(48, 2000)), 2000, optimizer=sgd))
    generator = np.random.default_rng(0)
    given: list[str] = []

    def normals(name: str, count: int) -> Tensor:
        given.append(name)
        return torch.from_numpy(generator.standard_normal(count))

    private = PrivateGradients(CLIP, 2.0, 4, normals)
    for _ in range(2):
        private(module, images(0))
    noise = torch.cat([cast(Tensor, p.grad).flatten() for p in module.parameters()])
    assert noise.mean().abs() < 4 * noise.std() / math.sqrt(len(noise))
    assert noise.std().item() == pytest.approx(2.0 * CLIP / 4, rel=0.01)
    assert len(set(given)) == len(given) == 4


def test_a_step_on_no_example_is_noise_alone_and_its_loss_is_none() -> None:
    module = begun(FedAvg(Net, CLASSES, optimizer=sgd))
    private = PrivateGradients(CLIP, 1.0, 4, lambda name, count: torch.ones(count))
    assert private(module, images(0)) == 0
    assert all(torch.equal(cast(Tensor, p.grad), torch.full_like(p, CLIP / 4)) for p in module.parameters())


class Poles(Net):
    """Divides by its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / x.abs().sum(dim=(1, 2, 3), keepdim=True))


@pytest.mark.parametrize("per_example", ["vmap", "loop"])
def test_an_example_whose_gradient_is_not_finite_counts_as_zero(per_example: Any) -> None:
    """And does not end the run, which would tell that it was there."""
    module, (x, y) = begun(FedAvg(Poles, CLASSES, optimizer=sgd)), images(4)
    x[1] = 0
    kept = torch.tensor([0, 2, 3])
    for found, expected in zip(
        gradients(module, (x, y), per_example=per_example).values(),
        gradients(module, (x[kept], y[kept]), per_example=per_example).values(),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
    private = PrivateGradients(CLIP, 0.0, 4, silent, per_example)
    assert private(module, (x, y)).isfinite()


def test_complex_parameters_are_refused() -> None:
    module = begun(FedAvg(Net, CLASSES, optimizer=sgd))
    module.register_parameter("phasor", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(FederationError, match="'phasor', which is complex"):
        gradients(module, images(2))


class Penalized(FedAvg):
    """Has a penalty of 3 w."""

    def phases(self) -> list[Phase]:
        [phase] = super().phases()
        return [replace(phase, penalty=lambda: 3 * torch.stack([p.sum() for p in self.parameters()]).sum())]


def test_a_penalty_is_added_as_it_is() -> None:
    """It depends on no example, so it is not clipped; to drop it without a word is what libraries with hooks do."""
    module, plain = begun(Penalized(Net, CLASSES, optimizer=sgd)), begun(FedAvg(Net, CLASSES, optimizer=sgd))
    plain.load_state_dict(module.state_dict())
    without = gradients(plain, images(4))
    for name, tensor in gradients(module, images(4)).items():
        torch.testing.assert_close(tensor, without[name] + 3)


def test_a_penalty_may_be_constant() -> None:
    module = begun(FedAvg(Net, CLASSES, optimizer=sgd))
    without = gradients(module, images(4))
    module.phase = replace(module.phase, penalty=lambda: torch.zeros(()))
    assert same(gradients(module, images(4)), without)


class Termed(FedAvg):
    """With a term in the loss itself."""

    def client_loss(self, batch: Any) -> Tensor:
        return super().client_loss(batch) + 3 * torch.stack([p.sum() for p in self.parameters()]).sum()


def test_a_term_of_the_loss_is_clipped_with_it() -> None:
    module, plain = begun(Termed(Net, CLASSES, optimizer=sgd)), begun(FedAvg(Net, CLASSES, optimizer=sgd))
    plain.load_state_dict(module.state_dict())
    without = gradients(plain, images(1), clip=1e9)
    for name, tensor in gradients(module, images(1), clip=1e9).items():
        torch.testing.assert_close(tensor, without[name] + 3)
    assert norm(gradients(module, images(1))) == pytest.approx(CLIP, rel=1e-5)


class Asked(FedAvg):
    """Counts in a buffer how often its loss was asked for."""

    def build(self) -> None:
        super().build()
        self.register_buffer("asked", torch.zeros(()))

    def phases(self) -> list[Phase]:
        return [self.local_phase("local", list(self.parameters()), self.counted_loss)]

    def counted_loss(self, batch: Any) -> Tensor:
        self.asked += 1
        return self.client_loss(batch)


@pytest.mark.parametrize(("per_example", "message"), [("vmap", "to loop"), ("loop", "Asked got .* its loss changes the model")])
def test_a_loss_that_changes_the_model_is_refused(per_example: Any, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        gradients(begun(Asked(Net, CLASSES, optimizer=sgd)), images(4), per_example=per_example)


def test_what_vmap_cannot_trace_is_told_how_to_go_on() -> None:
    [batch] = text_batches(1)
    with pytest.raises(FederationError, match=r"set privacy\.per_example to loop"):
        gradients(begun(new_method("HOMLoRA")), batch)


def test_scaled_gradients_are_refused() -> None:
    module = begun(FedAvg(Net, CLASSES, optimizer=sgd))
    module._trainer.precision = "16-mixed"
    with pytest.raises(FederationError, match="precision 16-mixed"):
        gradients(module, images(4))


def test_batches_are_poisson_samples() -> None:
    """Each example with the same probability, pairs independent, also whole batches; as many as if they were cut."""
    sampler = PoissonBatches(torch.arange(100, 130), 12, seed=3)
    assert len(sampler) == 3
    taken = torch.zeros(3000, 30)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(sampler):
            taken[3 * epoch + number, batch - 100] = 1
    spread = math.sqrt(0.4 * 0.6 / len(taken))
    assert (taken.mean(0) - 0.4).abs().max() < 4.5 * spread
    correlation = torch.corrcoef(taken.T).fill_diagonal_(0)
    assert correlation.abs().max() < 5 / math.sqrt(len(taken))
    sizes = taken.sum(1)
    assert sizes.var().item() == pytest.approx(30 * 0.4 * 0.6, rel=0.15)
    assert torch.corrcoef(torch.stack([sizes[:-1], sizes[1:]]))[0, 1].abs() < 4 / math.sqrt(len(taken))
    sampler.set_epoch(5)
    assert all(torch.equal(one, other) for one, other in zip(sampler, sampler, strict=True))
    assert [len(batch) for batch in PoissonBatches(torch.arange(5), 8, seed=0)] == [5]
