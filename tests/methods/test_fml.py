"""FML: two networks that teach each other, each as if the other one were data."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, INFO, Net, NoisyNet, StillNet, WideNet, X, Y, momentum, new_data, photos, private_states, same, sgd, still
from tiny_loops import drawn, fixed, mean_of, stripped, turn_of
from tiny_rounds import UniformFedAvg, assert_same_runs, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, kl_div, log_softmax

from lightning_fed.methods import FML, Standalone
from lightning_fed.models import CNN1, CNN2, CNN3, CNN4, CNN5

HETEROGENEOUS = [Net, WideNet]


class WildNet(Net):
    """Dropout, but no batch norm."""

    def encode(self, x: Tensor, cut: str = "features") -> Tensor:
        return dropout(super().encode(x), 0.5, self.training)


fit = partial(fit, rounds=2)


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


@pytest.mark.often(1)
@pytest.mark.parametrize(("alpha", "beta"), [(0.9, 0.2), (0.5, 0.5)], ids=["different", "equal"])
def test_rounds_are_those_of_a_bare_loop(alpha: float, beta: float) -> None:
    data, rounds, epochs = new_data(), 2, 2
    adam = partial(torch.optim.Adam, lr=0.01)
    model = FML(HETEROGENEOUS, CLASSES, WideNet, alpha, beta, optimizer=momentum, meme_optimizer=adam, epochs=epochs)
    federation = fit(model, data, rounds=rounds)

    template = drawn(FML(HETEROGENEOUS, CLASSES, WideNet))
    theta: nn.Module = template.shared
    networks = [template.for_client(client).backbone for client in data.clients]
    for round in range(1, rounds + 1):
        memes: list[nn.Module] = []
        for k, personal in enumerate(networks):
            meme = copy.deepcopy(theta)
            optimizers = momentum(personal.parameters()), adam(meme.parameters())
            for x, y in turn_of(data, k, round, epochs):
                p, q = personal(x), meme(x)
                log_p, log_q = log_softmax(p, dim=1), log_softmax(q, dim=1)
                q_over_p = kl_div(log_p, log_q.detach(), log_target=True, reduction="batchmean")
                p_over_q = kl_div(log_q, log_p.detach(), log_target=True, reduction="batchmean")
                loss_personal = alpha * cross_entropy(p, y) + (1 - alpha) * q_over_p
                loss_meme = beta * cross_entropy(q, y) + (1 - beta) * p_over_q
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss_personal.backward(retain_graph=True)
                loss_meme.backward()
                for optimizer in optimizers:
                    optimizer.step()
            memes.append(meme)
        theta = copy.deepcopy(theta)
        theta.load_state_dict(mean_of(memes))

    assert same(stripped(federation.run.server.state_dict(), "shared."), dict(theta.state_dict()))
    for k, network in enumerate(networks):
        assert same(stripped(dict(federation.run.store.get(k)), "backbone."), dict(network.state_dict()))


# ----------------------------------------------------------------------------------------------------- degenerate cases


@pytest.mark.parametrize("beta", mostly_slow([0.0, 0.3, 1.0], often={0.3}))
def test_alpha_1_is_standalone_bit_for_bit(beta: float) -> None:
    """Whatever the meme does, and draws: with dropout in both, with clipping, with another optimizer for the meme."""
    adam, common = partial(torch.optim.Adam, lr=0.05), {"epochs": 2, "gradient_clip": 0.5}
    ours = FML([NoisyNet, Net], CLASSES, NoisyNet, 1, beta, adam, optimizer=momentum, **common)
    alone = Standalone([NoisyNet, Net], CLASSES, momentum, **common)
    assert_same_runs(ours, alone, "clients", "results", rounds=3, participation=0.7)


@pytest.mark.parametrize("alpha", mostly_slow([0.0, 0.3, 1.0], often={0.3}))
def test_beta_1_is_fedavg_of_the_meme_bit_for_bit(alpha: float) -> None:
    """Whatever the personal networks do, and draw; with batch norm in the meme, and clipping. Both hold at once."""
    options = {"rounds": 3, "participation": 0.7}
    common = {"epochs": 2, "gradient_clip": 0.5}
    meme = fixed(StillNet)
    ours = fit(FML([WildNet, NoisyNet], CLASSES, meme, alpha, 1, momentum, optimizer=sgd, **common), **options)
    theirs = fit(UniformFedAvg(meme, CLASSES, momentum, **common), **options)
    assert same(stripped(ours.run.server.state_dict(), "shared."), stripped(theirs.run.server.state_dict(), "backbone."))
    if alpha == 1:
        alone = private_states(fit(Standalone([WildNet, NoisyNet], CLASSES, sgd, **common), **options))
        assert all(same(private_states(ours)[client], state) for client, state in alone.items())


# ------------------------------------------------------------------------------------------------------------- the loss


def test_each_gradient_is_that_of_its_own_loss_with_the_peer_as_data() -> None:
    module = FML(Net, CLASSES, WideNet, alpha=0.7, beta=0.4).for_client(INFO).double()
    x = X.double()
    p, q = module.backbone(x).softmax(dim=1), module.shared(x).softmax(dim=1)

    def loss(mine: Tensor, peer: Tensor, weight: float) -> Tensor:
        return -weight * mine[range(8), Y].log().mean() + (1 - weight) * (peer * (peer.log() - mine.log())).sum(dim=1).mean()

    own, meme = list(module.backbone.parameters()), list(module.shared.parameters())
    found = torch.autograd.grad(module.client_loss((x, Y)), [*own, *meme], retain_graph=True)
    expected = [
        *torch.autograd.grad(loss(p, q.detach(), 0.7), own, retain_graph=True),
        *torch.autograd.grad(loss(q, p.detach(), 0.4), meme, retain_graph=True),
    ]
    torch.testing.assert_close(list(found), expected)
    attached = torch.autograd.grad(loss(p, q, 0.7) + loss(q, p, 0.4), [*own, *meme])
    assert not torch.allclose(attached[0], expected[0])  # each network would also be taught to be easy to follow


def test_the_shared_network_draws_anew_in_each_step() -> None:
    """Though nothing else draws in between: two steps on one batch drop different features."""
    seen: list[Tensor] = []

    class Watched(WildNet):
        def encode(self, x: Tensor, cut: str = "features") -> Tensor:
            features = super().encode(x)
            if self.training and not x.is_meta:  # which FLOPs are counted on
                seen.append(features.detach())
            return features

    # the learning rate is 0, and a batch holds all
    fit(FML(Net, CLASSES, Watched, optimizer=still, epochs=4), new_data(1, 20, batch_size=64), rounds=2)
    dropped = [frozenset((features == 0).flatten().nonzero().flatten().tolist()) for features in seen[-8:]]
    assert len(set(dropped)) == 8


# ------------------------------------------------------------------------------------------------------- what is private


def test_the_meme_is_the_first_network_unless_it_is_named() -> None:
    for meme, expected in ((None, Net), (WideNet, WideNet), (WideNet(), WideNet)):
        modules = [FML(HETEROGENEOUS, CLASSES, meme).for_client(client) for client in new_data(2).clients]
        assert [type(module.backbone) for module in modules] == [Net, WideNet]
        assert [type(module.shared) for module in modules] == [expected, expected]


# ------------------------------------------------------------------------------------------------------ traffic, errors


@pytest.mark.parametrize(("networks", "meme", "values"), [(CNN1, None, 2_621_558), ([CNN1, CNN2, CNN3, CNN4, CNN5], CNN5, 670_058)])
def test_traffic_is_the_meme(networks: Any, meme: Any, values: int) -> None:
    row = fit(FML(networks, 10, meme, epochs=0), photos(10, 5), rounds=1).run.history[0]
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == values * 5
    assert row["traffic/down_bytes"] == row["traffic/up_bytes"] == 4 * values * 5


def test_the_logged_loss_is_the_mean_of_both_networks() -> None:
    class Unsure(Net):
        def classify(self, z: Tensor) -> Tensor:
            return 0 * super().classify(z)

    [round] = fit(FML(Unsure, CLASSES, Unsure, 1.0, 1.0, optimizer=sgd), new_data(), rounds=1).run.history
    assert round["train/mutual_loss"] == pytest.approx(math.log(CLASSES))
