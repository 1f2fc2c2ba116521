"""Differences of public code from the papers, as subclasses with one difference each; ``differences.py`` runs them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lightning_fed import FederatedModule
from lightning_fed.core import FineTuning, ServerUpdate
from lightning_fed.methods import (
    APFL,
    FD,
    FML,
    MOON,
    FedALA,
    FedAMP,
    FedAS,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedDyn,
    FedNova,
    FedRep,
    FedRoD,
    Floco,
    PerFedAvg,
    PFedMe,
    PFedSD,
)
from lightning_fed.models import MLP
from lightning_fed.nn.proximal import half_squared_distance


class LinearTermsAlone(FedDyn):
    """Of the distance only what is linear: clients are pushed along w, and nothing holds them near it."""

    def dynamic_penalty(self) -> Any:
        return super().dynamic_penalty() - self.alpha / 2 * sum(p.square().sum() for p in self.learning().values())


class DistanceNotSquared(FedDyn):
    """Held by a force of the same size at any distance."""

    def dynamic_penalty(self) -> Any:
        own = self.learning()
        distance = half_squared_distance(own.values(), self.global_parameters.values())
        return super().dynamic_penalty() + self.alpha * ((2 * distance + 1e-12).sqrt() / 2 - distance)


class WithoutComplement(FedNova):
    """Nothing of w is left where weights add up to less or more than 1."""

    def configure_server(self, clients: Any) -> Any:
        server = super().configure_server(clients)
        ours = server.combine

        def theirs(updates: Any, state: Any) -> Any:
            nothing = {name: torch.zeros_like(t) if t.is_floating_point() else t for name, t in state.items()}
            return ours(updates, nothing)

        server.combine = theirs
        return server


class Stays(ServerUpdate):
    """The server's model is never another one."""

    def __call__(self, state: Any, combined: Any, clients: int) -> Any:
        return state


class GlobalModelStays(PFedMe):
    """The server moves by 0."""

    def new_server(self, clients: Any) -> Any:
        server = self.configure_server(clients)
        server.update = Stays()
        return server


class WithoutAnchor(PFedMe):
    """Plain gradient steps, of which the last one is sent."""

    def envelope_loss(self, batch: Any) -> Any:
        self.lam = 0.0  # so that w has no gradient
        loss = super().envelope_loss(batch)
        self._copy(self.learning_parameters(self.backbone), self.learning_parameters(self.personal))
        return loss


class OwnGradient(APFL):
    """The personal network learns outside the mixture, and is replaced by it."""

    def forward(self, x: Any) -> Any:
        if self._outputs is None and self.training:
            return self.personal(x)
        return super().forward(x)

    def after_training(self, sums: Any) -> None:
        self.personal.load_state_dict({n: t.detach().clone() for n, t in self.mixture(self.alpha).items()}, strict=False)


class AdaptsOnTestData(PerFedAvg):
    """Adapts to a batch of what it is tested on."""

    def _adapt(self) -> None:
        data = self.trainer.datamodule
        train, data.train_dataloader = data.train_dataloader, data.test_dataloader
        try:
            super()._adapt()
        finally:
            data.train_dataloader = train


class LastModelOfAnybody(FedALA):
    """A client's last model is that of whoever was played before it."""

    def load_private_state(self, state: Any) -> None:
        if not self.turns:
            super().load_private_state(state)

    def load_initial(self, shared: Any) -> None:
        if not self.turns:
            super().load_initial(shared)


class TrainsAtTheCenter(Floco):
    """All corners learn alike until there are points."""

    def draw(self) -> torch.Tensor:
        return super().draw() if self.has_point else self.mixture.point.clone()


class AlignsTheServersModel(FedAS):
    """A client aligns the body that those before it in the round have aligned."""

    sent: Any = None
    aligned: Any = None

    def load_broadcast(self, broadcast: Any) -> None:
        super().load_broadcast(broadcast)
        if broadcast.state is self.sent:
            self.load_state_dict(self.aligned, strict=False)
        else:
            self.sent, self.aligned = broadcast.state, {}

    def after_step(self, optimizer: Any) -> None:
        if self.phase.name == "alignment":
            self.aligned = self.shared_state()

    def fine_tuning_phases(self) -> Any:
        self.load_state_dict(self.sent or {}, strict=False)  # measured is who has no such neighbours
        return super().fine_tuning_phases()


class AlignsMeans(FedAS):
    """The mean of a batch's examples of a class comes near the class's mean, not each example."""

    def alignment_loss(self, batch: Any) -> torch.Tensor:
        x, y = self.unpack(batch)
        belongs = torch.nn.functional.one_hot(y, self.num_classes).T.float()
        counts = belongs.sum(1)
        means = belongs @ self.backbone.encode(x) / counts.clamp(min=1)[:, None]
        return ((means - self.class_means).square().mean(1) * ((counts > 0) & self.known)).sum()


class TrainsTheExtractor(FedRoD):
    """The personal loss is kept from the generic head alone."""

    def client_loss(self, batch: Any) -> torch.Tensor:
        x, y = self.unpack(batch)
        features = self.backbone.encode(x)
        generic = self.backbone.classify(features)
        prior = self.gamma * self.label_counts().clamp(min=1e-12).log()
        return self.criterion(generic + prior, y) + self.criterion(generic.detach() + self.personal_logits(features), y)


class PredictsByThePersonalHead(FedRoD):
    """Personal logits are not added to the generic ones, and train the extractor."""

    def forward(self, x: Any) -> torch.Tensor:
        return self.personal_logits(self.backbone.encode(x))

    def client_loss(self, batch: Any) -> torch.Tensor:
        x, y = self.unpack(batch)
        features = self.backbone.encode(x)
        prior = self.gamma * self.label_counts().clamp(min=1e-12).log()
        return self.criterion(self.backbone.classify(features) + prior, y) + self.criterion(self.personal_logits(features), y)


class BeginsAsACopy(FedRoD):
    """The personal head begins as the generic one, not as zero."""

    def build(self) -> None:
        super().build()
        self.personal.load_state_dict(self.backbone.head.state_dict())


class MeanOverEntries(FML):
    """KL as the mean over examples and classes."""

    def mutual_loss(self, logits: Any, targets: Any, peer: Any, weight: float) -> Any:
        own = weight * self.criterion(logits, targets)
        return own + (super().mutual_loss(logits, targets, peer, weight) - own) / self.num_classes


class PeerLearnsToo(FML):
    """Each network is also taught to be easy to follow."""

    def client_loss(self, batch: Any) -> Any:
        x, y = self.unpack(batch)
        personal, meme = self.both(lambda network: network(x))
        loss = self.alpha * self.criterion(personal, y) + self.beta * self.criterion(meme, y)
        p, q = personal.log_softmax(1), meme.log_softmax(1)
        apart = p.exp() - q.exp()  # both divergences together, symmetric as both weights are 0.5
        return loss + 0.5 * (apart * (p - q)).sum(1).mean()


class LogitsAsTargets(FD):
    """Means of raw logits are what the cross-entropy is given as its target."""

    def add_outputs(self, logits: torch.Tensor, y: torch.Tensor) -> None:
        labels = torch.nn.functional.one_hot(y, self.num_classes)
        self.outputs = self.outputs + labels.T.double() @ logits.double()
        self.counts = self.counts + labels.sum(dim=0)


class BuffersStay(FedAvg):
    """Each client keeps its own statistics of batch norm."""

    def shared_names(self) -> set[str]:
        return super().shared_names() & {name for name, _ in self.named_parameters()}


class FirstBuffers(ServerUpdate):
    """The server's model keeps the buffers that it begins with."""

    def __call__(self, state: Any, combined: Any, clients: int) -> Any:
        return {name: state[name] if "running" in name else tensor for name, tensor in combined.items()}


class GlobalModelKeepsItsBuffers(FedAvg):
    """What is measured has statistics of other weights."""

    def configure_server(self, clients: Any) -> Any:
        server = super().configure_server(clients)
        server.update = FirstBuffers()
        return server


class FirstRoundLost(FedAvgM):
    """In the first round velocity becomes zero in the place of the clients' step."""

    def configure_server(self, clients: Any) -> Any:
        server = super().configure_server(clients)
        ours = server.combine

        def theirs(updates: Any, state: Any) -> Any:
            mean = ours(updates, state)
            return state if server.round == 1 else mean

        server.combine = theirs
        return server


class TeacherInTrainMode(PFedSD):
    """The teacher's predictions depend on the batch, and its statistics move."""

    def phases(self) -> Any:
        return [replace(phase, eval_modules=[]) for phase in super().phases()]


class MixtureIsACopy(APFL):
    """The personal network has no gradient: it becomes a running mean of the global one."""

    def forward(self, x: Any) -> Any:
        logits = super().forward(x)
        return logits.detach().requires_grad_() if self._outputs is None and self.training else logits

    def after_training(self, sums: Any) -> None:
        self.personal.load_state_dict({n: t.detach().clone() for n, t in self.mixture(self.alpha).items()}, strict=False)


class OtherSign(FedDyn):
    """The client's gradient is taken for its negative."""

    def dynamic_penalty(self) -> Any:
        own = self.learning()
        return super().dynamic_penalty() + 2 * sum((self.own_gradient[name] * p).sum() for name, p in own.items())


class StepsInARow(PerFedAvg):
    """The model is not put back before the outer step."""

    def compute_gradients(self, batch: Any) -> torch.Tensor:
        loss = super().compute_gradients(batch)
        self.load_state_dict(self.adapted(self.learnable(), batch[0]), strict=False)
        return loss


class NormMLP(MLP):
    """With a batch norm behind each hidden layer."""

    def __init__(self, num_classes: int = 10, inputs: int = 192) -> None:
        super().__init__(num_classes, inputs)
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(layer.out_features) for layer in self.hidden)

    def encode(self, x: torch.Tensor, cut: str = "features") -> torch.Tensor:
        x = x.flatten(1)
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = norm(layer(x)).relu()
        return x


@dataclass(frozen=True)
class Deviation:
    """A deviation.

    Args:
        ours: the method, and its name in tables.
        code: where it was read.
        what: it does.
        theirs: it.
        test: which tells them apart.
        options: of both.
    """

    ours: type[FederatedModule]
    code: str
    what: str
    theirs: Callable[..., FederatedModule]
    test: str
    options: dict[str, Any]


DEVIATIONS = [
    Deviation(
        APFL,
        "TsingZ0/PFLlib@d832e76",
        "$v_k$ follows its own gradient, and is overwritten by the mixture",
        OwnGradient,
        "test_apfl.py::test_gradients_are_those_of_the_formulas",
        {},
    ),
    Deviation(
        PFedMe,
        "TsingZ0/PFLlib@d832e76",
        "the global model stays ($\\beta$ 0)",
        GlobalModelStays,
        "test_pfedme.py::test_the_server_moves_by_beta",
        {},
    ),
    Deviation(
        PFedMe,
        "makgyver/fluke@a0bd26a",
        "no anchor, and $w$ is overwritten by $\\theta$",
        WithoutAnchor,
        "test_pfedme.py::test_rounds_and_personal_models_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        PerFedAvg,
        "CharlieDinh/pFedMe@caf24b1",
        "adapts to test data, with their labels",
        AdaptsOnTestData,
        "test_per_fedavg.py::test_a_client_is_measured_after_a_step_on_its_training_data",
        {"steps": 20},
    ),
    Deviation(
        FedBABU,
        "TsingZ0/PFLlib@d832e76",
        "reports what is there before fine-tuning",
        partial(FedBABU, fine_tuning=FineTuning(epochs=0)),
        "test_fedbabu.py::test_rounds_and_fine_tuning_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        FedALA,
        "KarhouTam/FL-bench@06e658b",
        "a client is mixed with whoever trained before it",
        LastModelOfAnybody,
        "test_fedala.py::test_rounds_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        MOON,
        "TsingZ0/PFLlib@d832e76",
        "$\\mu$ is 0",
        partial(MOON, mu=0.0),
        "test_moon.py::test_the_gradient_is_that_of_the_papers_loss",
        {},
    ),
    Deviation(
        FedDyn,
        "KarhouTam/FL-bench@06e658b",
        "without $\\frac{\\alpha}{2} \\lVert \\theta \\rVert^2$, so that the penalty is linear (gradients clipped at 10)",
        LinearTermsAlone,
        "test_feddyn.py::test_the_gradient_is_the_losss_minus_g_plus_alpha_times_the_drift",
        {"gradient_clip": 10.0},
    ),
    Deviation(
        FedDyn,
        "TsingZ0/PFLlib@d832e76",
        "the distance is not squared",
        DistanceNotSquared,
        "test_feddyn.py::test_the_gradient_is_the_losss_minus_g_plus_alpha_times_the_drift",
        {},
    ),
    Deviation(
        FedNova,
        "makgyver/fluke@a0bd26a",
        "weights of models do not add up to 1",
        WithoutComplement,
        "test_fednova.py::test_rounds_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        Floco,
        "dennis-grinwald/floco@34d8fd0",
        "trains at the center until clients have places",
        TrainsAtTheCenter,
        "test_floco.py::test_a_corner_has_its_share_of_the_gradient_at_a_point_of_the_simplex",
        {"corners": 5, "tau": 5},
    ),
    Deviation(
        FedAS,
        "xiyuanyang45/FedAS@1a4f5fd",
        "aligns the server's own model, one client after the other",
        AlignsTheServersModel,
        "test_fedas.py::test_rounds_are_those_of_a_plain_loop",
        {},
    ),
    Deviation(
        FedAS,
        "KarhouTam/FL-bench@dc52369",
        "aligns a batch's means, not each example",
        AlignsMeans,
        "test_fedas.py::test_the_alignment_counts_classes_and_not_examples",
        {},
    ),
    Deviation(
        FedAMP,
        "TsingZ0/PFLlib@d832e76",
        "the second term has no gradient",
        partial(FedAMP, lam=0.0),
        "test_fedamp.py::test_a_step_minimises_the_second_term",
        {},
    ),
    Deviation(
        FedRep,
        "TsingZ0/PFLlib@d832e76",
        "one epoch for the head",
        partial(FedRep, head_epochs=1),
        "test_personal_parts.py::test_fedrep_trains_the_head_then_the_representation",
        {},
    ),
    Deviation(
        FedRoD,
        "kxzxvbk/Fling@f6c6f1e",
        "the personal loss trains the extractor",
        TrainsTheExtractor,
        "test_fedrod.py::test_the_personal_loss_reaches_the_personal_head_alone",
        {},
    ),
    Deviation(
        FedRoD,
        "KarhouTam/FL-bench@06e658b",
        "predicts by the personal head alone, which trains the extractor",
        PredictsByThePersonalHead,
        "test_fedrod.py::test_a_zero_head_predicts_what_the_generic_one_does",
        {},
    ),
    Deviation(
        FedRoD,
        "TsingZ0/PFLlib@d832e76",
        "the personal head begins as a copy of the generic one",
        BeginsAsACopy,
        "test_fedrod.py::test_a_zero_head_predicts_what_the_generic_one_does",
        {},
    ),
    Deviation(
        FML,
        "TsingZ0/PFLlib@d832e76",
        "KL as the mean over all entries",
        MeanOverEntries,
        "test_fml.py::test_rounds_are_those_of_a_bare_loop",
        {},
    ),
    Deviation(
        FML,
        "TsingZ0/PFLlib@d832e76",
        "the peer is not detached",
        PeerLearnsToo,
        "test_fml.py::test_each_gradient_is_that_of_its_own_loss_with_the_peer_as_data",
        {},
    ),
    Deviation(
        FML,
        "TsingZ0/HtFLlib@e959261",
        "$\\alpha = \\beta = 1$",
        partial(FML, alpha=1.0, beta=1.0),
        "test_fml.py::test_rounds_are_those_of_a_bare_loop",
        {},
    ),
    Deviation(
        FD,
        "TsingZ0/PFLlib@d832e76",
        "raw logits are the targets of the cross-entropy",
        LogitsAsTargets,
        "test_fd.py::test_rounds_are_those_of_a_bare_loop",
        {},
    ),
    Deviation(
        FedAvg,
        "TsingZ0/PFLlib@d832e76",
        "statistics of batch norm do not travel",
        BuffersStay,
        "test_fedavg.py::test_batch_norm_statistics_are_averaged_and_their_counter_takes_the_maximum",
        {"backbone": NormMLP},
    ),
    Deviation(
        FedAvg,
        "CGCL-codes/pFedSD@8eba096",
        "the global model keeps its first statistics",
        GlobalModelKeepsItsBuffers,
        "test_fedavg.py::test_batch_norm_statistics_are_averaged_and_their_counter_takes_the_maximum",
        {"backbone": NormMLP},
    ),
    Deviation(
        FedAvgM,
        "makgyver/fluke@a0bd26a",
        "the first round is lost",
        FirstRoundLost,
        "test_server_optimizers.py::test_with_rate_1_and_no_momentum_it_is_fedavg_bit_for_bit",
        {},
    ),
    Deviation(
        PFedSD,
        "CGCL-codes/pFedSD@8eba096",
        "the teacher is in train mode",
        TeacherInTrainMode,
        "test_pfedsd.py::test_the_teacher_is_still_in_eval_mode_and_only_swapped_at_the_end",
        {"backbone": NormMLP},
    ),
    Deviation(
        APFL,
        "makgyver/fluke@a0bd26a",
        "$v_k$ has no gradient, and becomes the mixture",
        MixtureIsACopy,
        "test_apfl.py::test_gradients_are_those_of_the_formulas",
        {},
    ),
    Deviation(
        FedDyn,
        "makgyver/fluke@a0bd26a",
        "the other sign of $g_k$",
        OtherSign,
        "test_feddyn.py::test_it_finds_the_optimum_of_the_mean_and_a_known_mistake_does_not",
        {},
    ),
    Deviation(
        PerFedAvg,
        "makgyver/fluke@a0bd26a",
        "first order, and $w$ is not put back before the outer step",
        StepsInARow,
        "test_per_fedavg.py::test_rounds_are_those_of_a_plain_loop",
        {"steps": 20, "hessian": "first_order"},
    ),
]
