"""What a method is on the client: phases, state and copies, with and without a federation."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny import (
    CLASSES,
    METHODS,
    Net,
    NoisyNet,
    WideNet,
    assert_same,
    data_for,
    momentum,
    new_data,
    new_federation,
    new_method,
    new_trainer,
    same,
    sgd,
)
from tiny_frozen import frozen, new_case, projected
from torch import Tensor, nn

from lightning_fed.core.client_modules import ClientModules
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.phase import Phase
from lightning_fed.data import IID, InMemory
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.methods import Ditto, FedAMP, FedAvg, PFedLoRA, Standalone
from lightning_fed.models import Backbone, Transformer
from lightning_fed.seeding import INITIAL, TURN, derive_seed, seeded

CLIENT = ClientInfo(1, 30, 5, 5, (10, 10, 5, 5))
OTHER = ClientInfo(3, 30, 5, 5, (10, 10, 5, 5))


class TwoPhases(FederatedModule):
    """The layers before the head, then the head; what happens is noted."""

    def __init__(
        self, first: dict[str, int], second: dict[str, int], backbone: Callable[[int], Net] = NoisyNet, **kwargs: Any
    ) -> None:
        super().__init__(backbone, CLASSES, momentum, **kwargs)
        self.spans = (first, second)
        self.steps: list[tuple[str, int]] = []
        self.starts: list[dict[str, Tensor]] = []
        self.momenta: list[bool] = []
        self.modes: list[bool] = []

    def phases(self) -> list[Phase]:
        head = list(self.backbone.head.parameters())
        body = [p for name, p in self.backbone.named_parameters() if not name.startswith("head.")]
        return [
            Phase("body", body, self.client_loss, momentum, **self.spans[0]),
            Phase("head", head, self.client_loss, momentum, **self.spans[1], eval_modules=[self.backbone]),
        ]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        if not self.steps or self.steps[-1][0] != self.phase.name:
            self.starts.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
            optimizer = self.trainer.optimizers[[phase.name for phase in self.running_phases].index(self.phase.name)]
            self.momenta.append(bool(optimizer.state))
        return super().on_train_batch_start(batch, batch_idx)

    def client_step(self, batch: Any) -> Tensor:
        loss = super().client_step(batch)
        self.steps.append((self.phase.name, self.current_epoch))
        self.modes.append(self.backbone.training)
        learning = {id(p) for p in self.phase.parameters}
        for parameter in self.parameters():
            assert (parameter.grad is not None) == parameter.requires_grad == (id(parameter) in learning)
        return loss


def fit(module: FederatedModule, epochs: int, data: InMemory | None = None, **options: Any) -> L.Trainer:
    trainer = new_trainer(**QUIET, max_epochs=epochs, limit_val_batches=0, **options)
    trainer.fit(module, datamodule=(data or new_data(num_clients=1, size=100, batch_size=16)).client(0))
    return trainer


BATCHES = 5
"""80 training examples in batches of 16."""


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"epochs": 2}, {"epochs": 1}, [("body", 0)] * 5 + [("body", 1)] * 5 + [("head", 2)] * 5),
        ({"steps": 7}, {"epochs": 1}, [("body", 0)] * 5 + [("body", 1)] * 2 + [("head", 2)] * 5),
        ({"steps": 5}, {"steps": 3}, [("body", 0)] * 5 + [("head", 1)] * 3),
        ({"epochs": 0}, {"epochs": 1}, [("head", 0)] * 5),
        ({"steps": 0}, {"steps": 1}, [("head", 0)]),
        ({"epochs": 1}, {"epochs": 0}, [("body", 0)] * 5),
    ],
)
def test_phases_run_in_order_for_as_long_as_they_say(
    first: dict[str, int], second: dict[str, int], expected: list[tuple[str, int]]
) -> None:
    module = TwoPhases(first, second)
    module.configure_model()
    fit(module, module.num_epochs(BATCHES))
    assert module.steps == expected


def test_phases_start_over_until_the_trainer_stops() -> None:
    module = TwoPhases({"steps": 2}, {"epochs": 1})
    fit(module, 4)
    assert module.steps == [("body", 0)] * 2 + [("head", 1)] * 5 + [("body", 2)] * 2 + [("head", 3)] * 5


def test_each_start_of_a_phase_has_a_fresh_optimizer() -> None:
    module = TwoPhases({"epochs": 1}, {"epochs": 1})
    fit(module, 4)
    assert module.momenta == [False] * 4


def test_what_does_not_learn_stays_bit_for_bit() -> None:
    module = TwoPhases({"epochs": 2}, {"epochs": 2})
    fit(module, 4)
    before, between = module.starts
    after = module.state_dict()
    head = {name for name in after if name.startswith("backbone.head.")}
    body = {name for name, _ in module.named_parameters()} - head
    buffers = {name for name, _ in module.named_buffers()}
    assert {name for name in after if not torch.equal(before[name], between[name])} == body | buffers
    assert {name for name in after if not torch.equal(between[name], after[name])} == head


def test_eval_modules_are_in_eval_mode_during_their_phase_only() -> None:
    module = TwoPhases({"epochs": 1}, {"epochs": 1})
    fit(module, 3)
    assert module.modes == [True] * 5 + [False] * 5 + [True] * 5
    assert all(part.training for part in module.backbone.modules())


@pytest.mark.parametrize("spans", [{}, {"epochs": 1, "steps": 1}])
def test_a_phase_is_counted_in_epochs_or_in_steps(spans: dict[str, int]) -> None:
    with pytest.raises(FederationError, match="give exactly one"):
        Phase("local", [], torch.sum, sgd, **spans)


class FrozenBody(FederatedModule):
    """A pretrained body that never changes; only the head travels."""

    def build(self) -> None:
        super().build()
        self.backbone.fc1.requires_grad_(False)
        self.backbone.fc2.requires_grad_(False)


def test_what_build_froze_stays_frozen_and_does_not_travel() -> None:
    module = FrozenBody(Net, CLASSES, momentum)
    module.configure_model()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fit(module, 1)
    frozen = {name for name in before if not name.startswith("backbone.head.")}
    assert {name for name, tensor in module.state_dict().items() if torch.equal(before[name], tensor)} == frozen
    assert {name for name, p in module.named_parameters() if not p.requires_grad} == frozen
    assert module.shared_names() == before.keys() - frozen
    assert module.private_names() == set()


def test_gradients_are_clipped_to_the_norm() -> None:
    """One step of plain SGD moves the weights by lr times the clipped gradient."""
    module = FedAvg(Net, CLASSES, sgd, gradient_clip=1e-3)
    module.configure_model()
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    fit(module, 1, limit_train_batches=1)
    moved = nn.utils.parameters_to_vector(module.parameters()).detach() - before
    assert moved.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_gradients_that_are_scaled_are_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(L.Trainer, "precision", property(lambda self: "16-mixed"))  # on a CPU, Lightning would choose another
    with pytest.raises(FederationError, match=r"gradient_clip is 1\.0 with precision 16-mixed"):
        fit(FedAvg(Net, CLASSES, sgd, gradient_clip=1.0), 1)
    assert fit(FedAvg(Net, CLASSES, sgd), 1).global_step > 0


@pytest.mark.parametrize("method", [FedAvg, Standalone, PFedLoRA])
def test_alone_in_somebody_elses_project(method: type[FederatedModule]) -> None:
    """Two epochs of a Trainer with its defaults, validation included."""
    data, module = new_data(), method(Net, num_classes=CLASSES)
    trainer = new_trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, data.client(0))
    assert trainer.current_epoch == 2
    assert "val/accuracy" in trainer.callback_metrics
    assert "test/accuracy" in trainer.test(module, data.client(0), verbose=False)[0]


def test_alone_equals_the_first_turn_of_a_federation() -> None:
    """A turn adds nothing to a fit but the order of the batches."""
    data = new_data(num_clients=1)
    federation = new_federation(rounds=1)
    federation.fit(Standalone(Net, CLASSES, momentum), data)
    module, client = Standalone(Net, CLASSES, momentum).for_client(data.clients[0]), data.client(0)
    client.order_seed = derive_seed(federation.seed, TURN, 1, 0)
    new_trainer(**QUIET, max_epochs=1).fit(module, client)
    assert same(module.private_state(), federation.run.store.get(0))


# ------------------------------------------------------------------------------------------------------------ copies


def test_initial_weights_are_a_function_of_seed_and_client() -> None:
    template = FedAvg(Net, CLASSES)
    states = [
        template.for_client(client, seed).state_dict() for client, seed in [(CLIENT, 0), (CLIENT, 0), (OTHER, 0), (CLIENT, 1)]
    ]
    assert same(states[0], states[1])
    assert not torch.equal(states[0]["backbone.fc1.weight"], states[2]["backbone.fc1.weight"])
    assert not torch.equal(states[0]["backbone.fc1.weight"], states[3]["backbone.fc1.weight"])


def test_initial_weights_leave_the_callers_random_state_alone() -> None:
    before = torch.get_rng_state()
    FedAvg(Net, CLASSES).for_client(CLIENT)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("adapter", ["reduction", "factorized"])
def test_an_adapter_does_not_shift_the_backbones_initial_weights(adapter: str) -> None:
    with_adapter = PFedLoRA(Net, CLASSES, adapter=adapter).for_client(CLIENT)
    without = Standalone(Net, CLASSES).for_client(CLIENT)
    assert same(with_adapter.backbone.state_dict(), without.backbone.state_dict())


def test_copies_share_no_tensor_with_their_template() -> None:
    template = PFedLoRA([Net, WideNet], CLASSES)
    template.configure_model()
    one, other = template.for_client(CLIENT), template.for_client(CLIENT)
    pointers = [{t.data_ptr() for t in module.state_dict().values()} for module in (template, one, other)]
    assert not pointers[0] & pointers[1]
    assert not pointers[1] & pointers[2]
    before = {name: tensor.clone() for name, tensor in template.state_dict().items()}
    fit(one, 2)
    assert same(template.state_dict(), before)
    assert template.client is None
    assert isinstance(one.backbone, WideNet)
    assert isinstance(template.backbone, Net)


@pytest.mark.filterwarnings("ignore:Attribute 'body' is an instance of `nn.Module`")  # here, sharing it is meant
def test_frozen_networks_that_init_was_given_are_shared_by_the_copies() -> None:
    class Pretrained(FederatedModule):
        def __init__(self, body: nn.Module) -> None:
            super().__init__(Net, CLASSES)
            self.body = body

    template = Pretrained(nn.Linear(3, 3).requires_grad_(False))
    one, other = template.for_client(CLIENT), template.for_client(OTHER)
    assert one.body.weight is other.body.weight
    assert one.shared_names() == {name for name in one.state_dict() if name.startswith("backbone.")}


class OwnLast(FedAvg):
    """Its ``__init__`` makes a layer, as is usual with Lightning; it stays with each client."""

    def __init__(self, backbone: Any, num_classes: int = CLASSES, **kwargs: Any) -> None:
        super().__init__(backbone, num_classes, **kwargs)
        self.last = nn.Linear(CLASSES, CLASSES)
        self.layers = [self.last]  # what a list holds is the same

    def shared_names(self) -> set[str]:
        return {name for name in super().shared_names() if not name.startswith("last.")}

    def forward(self, x: Any) -> Tensor:
        return self.layers[0](self.backbone(x))


def test_a_layer_that_init_makes_is_each_clients_own() -> None:
    method, data = OwnLast(Net, optimizer=sgd), new_data()
    before, runs = method.last.weight.detach().clone(), [new_federation(2), new_federation(2)]
    for run in runs:
        run.fit(method, data)
    assert torch.equal(method.last.weight, before)
    assert same(*(run.run.server.state for run in runs))
    one = runs[0].client_module(0)
    kept = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    other = runs[0].client_module(3)
    assert same(one.state_dict(), kept)
    assert not torch.equal(one.last.weight, other.last.weight)
    assert one.layers == [one.last]


def test_a_layer_that_cannot_be_copied_is_named() -> None:
    class Locked(FedAvg):
        def __init__(self, backbone: Any) -> None:
            super().__init__(backbone, CLASSES)
            self.last = nn.Linear(2, 2)
            self.last.lock = threading.Lock()

    with pytest.raises(FederationError, match=r"Locked.last was made in __init__ and cannot be copied .* make it in build\(\)"):
        new_federation(1).fit(Locked(Net), new_data(2, 60))


class Caches(Net):
    """Keeps a constant from its first batch on, which nobody trains."""

    def forward(self, x: Any) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.zeros(CLASSES))
        return super().forward(x) + self.shift


def test_a_buffer_of_the_first_batch_is_left_to_the_network() -> None:
    assert len(new_federation(1).fit(FedAvg(Caches, CLASSES), new_data(2, 60))) == 1


class Late(FedAvg):
    def configure_model(self) -> None:
        if not self.is_built:
            super().configure_model()
            self.late = nn.Linear(CLASSES, CLASSES)

    def forward(self, x: Any) -> Tensor:
        return self.late(self.backbone(x))


class LateInSetup(Late):
    def configure_model(self) -> None:
        super(Late, self).configure_model()

    def setup(self, stage: str) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(CLASSES, CLASSES)


class Misnamed(FedAvg):
    def shared_names(self) -> set[str]:
        return set(self.backbone.head_names())


class OwnOptimizers(FedAvg):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnStep(FedAvg):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.client_loss(batch)


class NoLoss(FedAvg):
    def client_loss(self, batch: Any) -> Any:
        super().client_loss(batch)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Late, "'late.weight', which was added after build.*: add it in build"),
        (LateInSetup, "'late.weight', which was added after build"),
        (Misnamed, "shared_names of Misnamed has 'head.bias', which is no name .* did you mean 'backbone.head.bias'"),
        (OwnOptimizers, "overrides configure_optimizers, which gives each phase its optimizer"),
        (OwnStep, "OwnStep overrides training_step, which runs the phases. Override client_loss"),
        (NoLoss, "loss of a batch in phase 'local' is a NoneType: let client_loss"),
        (partial(FedAvg, optimizer="sgd"), "phase 'local' refuses its settings: 'str' object is not callable"),
        (partial(FedAvg, optimizer=lambda parameters: None), "returned a NoneType: let it return a torch.optim.Optimizer"),
        (partial(FedAvg, loss="cross_entropy"), "loss is 'cross_entropy': give a function of outputs and targets"),
        (partial(FedAvg, metrics=["f1"]), "metrics is a list: give metrics by name"),
    ],
)
def test_what_lightnings_users_try_is_told_in_words(method: Any, said: str) -> None:
    with pytest.raises(FederationError, match=said):
        new_federation(1).fit(method(Net, CLASSES), new_data(2, 60))


def test_a_trainer_is_no_function_that_builds_one() -> None:
    with pytest.raises(FederationError, match=r"pass partial\(L.Trainer, devices=1, …\)"):
        new_federation(1, trainer=new_trainer())


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("name", ["projection", "adapter"])
def test_what_is_drawn_and_frozen_is_one_tensor_for_all_clients_of_an_architecture(name: str, built: bool) -> None:
    template, _ = new_case(name)
    if built:
        with seeded(0, INITIAL):
            template.configure_model()
    clients = [ClientInfo(id, 30, 5, 5, (10, 10, 5, 5)) for id in (1, 3, 5, 2)]
    one, same_kind, third, other_kind = map(ClientModules(template, seed=0).of, clients)
    assert frozen(one)
    assert all(tensor is frozen(same_kind)[key] is frozen(third)[key] for key, tensor in frozen(one).items())
    if name == "projection":
        assert not frozen(one).keys() & one.private_names()
        assert not any(torch.equal(one.state_dict()[key], same_kind.state_dict()[key]) for key in one.private_names())
        assert torch.equal(frozen(one)["projection.weight"], another_first(5)["projection.weight"])
        assert built == (frozen(template).keys() != set() and frozen(other_kind)["projection.bias"] is template.projection.bias)


def another_first(id: int) -> dict[str, Tensor]:
    return frozen(projected().for_client(ClientInfo(id, 30, 5, 5, (10, 10, 5, 5))))


def test_another_seed_draws_another_frozen_tensor() -> None:
    template = projected()
    assert not torch.equal(*(frozen(template.for_client(CLIENT, seed))["projection.weight"] for seed in (0, 1)))


@pytest.mark.often(1)
@pytest.mark.parametrize("name", ["projection", "adapter"])
def test_a_method_that_is_fitted_twice_does_not_remember(name: str) -> None:
    """Neither what was drawn for another seed nor where the first run ended."""
    method, data = new_case(name)
    ends = []
    for model, seed in ((method, 0), (method, 1), (new_case(name)[0], 1)):
        federation = new_federation(1, seed=seed)
        federation.fit(model, data)
        federation.run.server_module()
        ends.append(federation)
    assert_same(*ends[1:])
    one, other = (frozen(federation.client_module(0)) for federation in ends[:2])
    assert not any(torch.equal(one[key], other[key]) for key in one if "LayerNorm" not in key and "bias" not in key)


def test_a_pretrained_frozen_part_is_what_clients_train_with() -> None:
    """Networks that exist when a run begins are those that it begins with, also where they do not learn."""
    model = projected()
    model.configure_model()
    with torch.no_grad():
        model.projection.weight.fill_(0.25)
    federation = new_federation(1)
    federation.fit(model, new_data(4, 120))
    assert all((federation.client_module(k).projection.weight == 0.25).all() == (k % 2 == 0) for k in range(4))


def test_client_k_gets_network_k_mod_their_number() -> None:
    template = Standalone([Net, WideNet, NoisyNet], CLASSES)
    clients = [ClientInfo(id, 1, 1, 1, ()) for id in range(7)]
    networks = [type(template.for_client(client).backbone) for client in clients]
    assert networks == [Net, WideNet, NoisyNet, Net, WideNet, NoisyNet, Net]


# ------------------------------------------------------------------------------------------- the number of classes


def three_classes() -> InMemory:
    return InMemory(torch.rand(60, 3, 4, 4), torch.arange(60) % 3, 3, num_clients=2, partition=IID(), batch_size=10)


@pytest.mark.parametrize("name", METHODS)
def test_the_number_of_classes_comes_from_the_data(name: str) -> None:
    module = new_method(name, num_classes=None)
    with pytest.raises(FederationError, match="does not know how many classes there are: give num_classes"):
        module.configure_model()
    module = module.unbuilt_copy()
    module.know_classes(3)
    inputs, _ = next(iter(data_for(name, num_clients=1, size=8).client(0).train_dataloader()))
    assert module(inputs).shape[1] == 3  # which builds it
    assert {net.num_classes if isinstance(net, Transformer) else net.num_outputs for net in module.modules() if kind(net)} == {3}


def kind(network: nn.Module) -> bool:
    return isinstance(network, Backbone | Transformer)


def test_a_federation_and_a_trainer_find_the_number_of_classes(tmp_path: Path) -> None:
    federation, method = new_federation(1), FedAvg(Net)
    federation.fit(method, three_classes())
    assert federation.run.server.state["backbone.head.bias"].shape == (3,)
    module = FedAvg(Net)
    trainer = new_trainer(**QUIET, max_epochs=1)
    trainer.fit(module, three_classes().client(0))
    trainer.save_checkpoint(tmp_path / "trained.ckpt")
    assert FedAvg.load_from_checkpoint(tmp_path / "trained.ckpt").backbone.head.out_features == 3


@pytest.mark.parametrize("built", [False, True])
def test_another_number_of_classes_than_the_data_have_is_refused(built: bool) -> None:
    method = FedAvg(Net, 10)
    if built:
        method.configure_model()
    with pytest.raises(FederationError, match=r"FedAvg got num_classes=10, but the data have 3: leave it out"):
        new_federation(1).fit(method, three_classes())


# ------------------------------------------------------------------------------------------------------------ state


def test_states_are_copies() -> None:
    module = new_method("PFedLoRA").for_client(CLIENT)
    for state in (module.shared_state(), module.private_state()):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for tensor in state.values():
            tensor.zero_()
        assert same(module.state_dict(), before)


def test_state_that_does_not_fit_is_refused() -> None:
    module = new_method("PFedLoRA").for_client(CLIENT)
    with pytest.raises(FederationError, match=r"The shared state for PFedLoRA lacks 'adapter\.0\.bias' and 3 more"):
        module.load_shared_state({})
    with pytest.raises(FederationError, match=r"The private state for PFedLoRA holds 'adapter.*does not belong"):
        module.load_private_state(module.state_dict())


def test_an_empty_list_of_networks_is_refused() -> None:
    with pytest.raises(FederationError, match="backbone is an empty list"):
        Standalone([], CLASSES)


def test_the_models_that_a_run_hands_out_are_not_the_one_that_it_was_given() -> None:
    """A second run begins where the first one began."""
    model = FedAvg(Net(CLASSES), CLASSES)
    model(torch.zeros(1, 3, 4, 4))
    before = model.shared_state()
    federation = new_federation(1)
    federation.fit(model, new_data(2, size=40))
    served = federation.run.server_module()
    assert same(served.shared_state(), federation.run.server.state)
    assert not same(served.shared_state(), before)
    assert same(model.shared_state(), before)


def test_nothing_to_train_is_said_to_a_trainer() -> None:
    with pytest.raises(FederationError, match="FedAvg has nothing to train: give it epochs or steps above 0"):
        new_trainer(max_epochs=1).fit(FedAvg(Net, CLASSES, epochs=0), new_data(1, size=40).client(0))


class Waves(Net):
    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.register_buffer("frequencies", torch.ones(2, dtype=torch.complex64))


class Phasors(Net):
    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes)
        self.phasors = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class Versioned(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (FedAvg(Waves, CLASSES), "FedAvg would send 'backbone.frequencies', which is complex"),
        (FedAMP(Phasors, CLASSES), "FedAMP would send 'model/backbone.phasors', which is complex"),
        (FedAvg(Versioned, CLASSES), "FedAvg would send 'backbone._extra_state', which is a dict"),
        (Standalone(Versioned, CLASSES), "Standalone would keep 'backbone._extra_state', which is a dict"),
        (Ditto(Versioned, CLASSES), "Ditto would send 'backbone._extra_state', which is a dict"),
        (
            FedAvg(Net, CLASSES, partial(torch.optim.SGD, lr=-1.0)),
            "phase 'local' refuses its settings: Invalid learning",
        ),
    ],
)
def test_what_cannot_be_averaged_or_trained_is_said_before_the_first_round(module: FederatedModule, said: str) -> None:
    """A robust rule dropped imaginary parts, and the mean ended in an error of torch."""
    with pytest.raises(FederationError, match=said):
        new_federation(1).fit(module, new_data(2, 40))


class Chooses(FedAvg):
    chosen: tuple[int, ...] = ()

    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Sequence[ClientInfo]:
        return [ClientInfo(client, 10, 10, 10, ()) for client in self.chosen]


@pytest.mark.parametrize(("chosen", "said"), [((), "returned no clients"), ((0, 2), r"returned clients \[2\] in round 1")])
def test_who_may_not_take_part_is_not_trained(chosen: tuple[int, ...], said: str) -> None:
    method = type("Chooses", (Chooses,), {"chosen": chosen})
    with pytest.raises(FederationError, match=said):
        new_federation(1, eligible_clients=[0, 1]).fit(method(Net, CLASSES), new_data(3, size=60))


class ChoosesIds(FedAvg):
    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Any:
        return [client.id for client in clients]


class ChoosesLazily(FedAvg):
    def cohort(self, clients: Sequence[ClientInfo], round: int, seed: int) -> Any:
        return (client for client in clients)


@pytest.mark.parametrize(("method", "said"), [(ChoosesIds, r"\[0, 1\]"), (ChoosesLazily, "<generator object .*")])
def test_a_cohort_is_a_list_of_clients(method: type[FedAvg], said: str) -> None:
    with pytest.raises(
        FederationError, match=rf"cohort\(\) of {method.__name__} returned {said} in round 1: return a list of some"
    ):
        new_federation(1).fit(method(Net, CLASSES), new_data(2, size=40))


class OtherBatch(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).repeat(1, 7).view(-1, 7)


class TwoInputs(Net):
    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class OwnMistake(Net):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not yet")


@pytest.mark.parametrize(
    ("network", "kind", "said"),
    [
        (OtherBatch, FederationError, "the first step failed: OtherBatch, given inputs .*Expected input batch_size"),
        (TwoInputs, FederationError, "the first step failed: TwoInputs, .*missing 1 required positional argument: 'more'"),
        (OwnMistake, ValueError, "not yet"),
    ],
)
def test_a_first_step_that_fails_is_told_in_words(network: type[Net], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        new_federation(1).fit(FedAvg(network, CLASSES), new_data(2, size=40))


@pytest.mark.parametrize(("method", "drawn"), [(FedAvg, 0), (Standalone, 2)])
def test_where_moments_alone_stay_no_network_is_drawn_for_them(
    method: type[FederatedModule], drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[int] = []
    of = ClientModules.of
    monkeypatch.setattr(ClientModules, "of", lambda self, client: clients.append(client.id) or of(self, client))
    new_federation(1, evaluate_every=0).fit(method(Net, CLASSES, momentum, persistent=True), new_data(2, size=40))
    assert len(clients) == drawn


@pytest.mark.parametrize(("options", "said"), [({"epochs": 5}, True), ({"epochs": 5, "steps": None}, False), ({"steps": 3}, False)])
def test_epochs_beside_steps_are_said_to_have_no_effect(
    options: dict[str, Any], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also beside the steps that a method has by default."""
    new_method("PerFedAvg", **options).check_rounds(1)
    assert ("so epochs=5 has no effect: set steps to null" in caplog.text) == said
