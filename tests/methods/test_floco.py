"""Floco: a simplex of heads, in which each client gets a place."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from tiny import CLASSES, INFO, Net, Recording, momentum, new_data, private_states, same, sgd
from tiny_loops import batches, fixed, step
from tiny_rounds import fit
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm

from lightning_fed.core import FederationError, weighted_mean
from lightning_fed.methods import FedAvg, Floco
from lightning_fed.methods.floco import POINT, SimplexServer
from lightning_fed.nn.simplex import principal_scores, projected, spread

fit = partial(fit, rounds=3)
BATCH = torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES


def test_with_one_corner_it_is_fedavg_bit_for_bit() -> None:
    ours = fit(Floco(Net, CLASSES, 1, 1, 0.0, optimizer=momentum, epochs=2))
    theirs = fit(FedAvg(Net, CLASSES, momentum, epochs=2))
    assert same(ours.client_module(0).export_state(), theirs.run.server.state_dict())
    assert ours.run.results == theirs.run.results


def built(**options: Any) -> Floco:
    module = Floco(Net, CLASSES, 3, optimizer=sgd, **options).for_client(INFO)
    assert isinstance(module, Floco)
    return module


def test_a_corner_has_its_share_of_the_gradient_at_a_point_of_the_simplex() -> None:
    """Another one in each step."""
    module, found = built(), []
    for _ in range(2):
        module.zero_grad()
        state = torch.get_rng_state()
        module.drawn_loss(BATCH).backward()
        torch.set_rng_state(state)
        point = module.draw()
        assert point.sum().item() == pytest.approx(1)
        assert (point > 0).all()
        corners = dict(module.named_parameters())[module.corners_name]
        weight = torch.tensordot(point, corners, dims=1).detach().requires_grad_()
        plain = Net(CLASSES)
        state_dict = {name.removeprefix("backbone."): t for name, t in module.export_state().items()}
        cross_entropy(functional_call(plain, state_dict | {"head.weight": weight}, (BATCH[0],)), BATCH[1]).backward()
        for share, grad in zip(point, corners.grad, strict=True):
            torch.testing.assert_close(grad, share * weight.grad)
        found.append(point)
    assert not torch.equal(*found)
    assert torch.equal(module.mixture.point, torch.full((3,), 1 / 3))


def test_who_has_a_point_trains_near_it() -> None:
    """Within rho, in every direction; with rho 0 at the point. The center is the mean of the corners."""
    module = built(rho=0.2)
    corners = module.state_dict()[module.corners_name]
    torch.testing.assert_close(module.export_state()["backbone.head.weight"], corners.mean(dim=0))
    own = torch.tensor([0.7, 0.3, 0.0])
    module.load_payload({POINT: own})
    draws = torch.stack([module.draw() - own for _ in range(200)])
    assert draws.abs().sum(dim=1).max() <= 0.2
    assert draws.abs().sum(dim=1).max() > 0.19
    assert (draws.amax(dim=0) > 0.05).all()
    assert (draws.amin(dim=0) < -0.05).all()
    torch.testing.assert_close(module.export_state()["backbone.head.weight"], torch.tensordot(own, corners, dims=1))
    torch.testing.assert_close(module.export_state(private=False)["backbone.head.weight"], corners.mean(dim=0))
    module.rho = 0.0
    assert torch.equal(module.draw(), own)


def test_draws_are_uniform_in_the_simplex_and_then_in_their_distance() -> None:
    """By their moments."""
    module, own = built(rho=0.2), torch.tensor([0.7, 0.3, 0.0])
    points = torch.stack([module.draw() for _ in range(4000)])
    torch.testing.assert_close(points.square().mean(dim=0), torch.full((3,), 1 / 6), atol=0.01, rtol=0)
    module.load_payload({POINT: own})
    distances = torch.stack([module.draw() - own for _ in range(4000)]).abs().sum(dim=1)
    assert distances.mean().item() == pytest.approx(0.1, abs=0.005)
    assert distances.std().item() == pytest.approx(0.2 / 12**0.5, abs=0.005)


def test_rounds_are_those_of_a_plain_loop() -> None:
    """Without a way from their points, which they get in the first round, from what they sent. The center is drawn from before."""

    class Centered(Floco):
        def draw(self) -> torch.Tensor:
            return self.mixture.point.clone()

    data = new_data(3, 120)
    engine = Recording()
    federation = fit(Centered(fixed(Net), CLASSES, 2, 1, optimizer=sgd), data, engine=engine)
    corners_name, state = federation.client_module(0).corners_name, engine.turns[0].broadcast.state
    plain, points = Net(CLASSES), torch.full((3, 2), 0.5)
    for round in (1, 2, 3):
        states = []
        for client in range(3):
            own = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
            optimizer = sgd(own.values())
            for x, y in batches(data, client, round, 0):
                weights = {n.removeprefix("backbone."): t for n, t in own.items() if n != corners_name}
                head = torch.tensordot(points[client], own[corners_name], dims=1)
                step(optimizer, cross_entropy(functional_call(plain, weights | {"head.weight": head}, (x,)), y))
            states.append({name: tensor.detach() for name, tensor in own.items()})
        state = weighted_mean(states, [info.num_train for info in data.clients])
        if round == 1:
            points = spread(principal_scores(torch.stack([s[corners_name].flatten() for s in states]).double(), 2)).float()
    torch.testing.assert_close(federation.run.server.state, state, rtol=1e-4, atol=1e-5)
    for client, point in enumerate(points):
        torch.testing.assert_close(federation.run.server.client_state.get(client)[POINT], point, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(federation.client_module(client).mixture.point, point, rtol=1e-3, atol=1e-4)


def test_everybody_takes_part_in_the_round_that_gives_points() -> None:
    """Points travel down alone; nothing stays with clients."""
    engine = Recording()
    federation = fit(Floco(Net, CLASSES, 3, 2, optimizer=sgd), new_data(6, 240), participation=0.5, engine=engine)
    per_round = {r: [turn.client.id for turn in engine.turns if turn.round == r and turn.verb == "fit"] for r in (1, 2, 3)}
    assert [len(clients) for clients in per_round.values()] == [3, 6, 3]
    assert all((POINT in turn.broadcast.state) == (turn.round > 2) for turn in engine.turns if turn.verb == "fit")
    assert all(POINT not in update.state for update in engine.trained)
    assert not private_states(federation)
    points = torch.stack([federation.run.server.client_state.get(client)[POINT] for client in range(6)])
    torch.testing.assert_close(points.sum(dim=1), torch.ones(6))
    assert (points >= 0).all()
    assert torch.pdist(points).min() > 0
    assert "global/test_accuracy" in federation.run.history[-1]


def test_a_continued_run_has_the_points() -> None:
    whole = fit(Floco(Net, CLASSES, 2, 1, optimizer=sgd), run_dir="whole")
    fit(Floco(Net, CLASSES, 2, 1, optimizer=sgd), rounds=2, run_dir="stopped")
    continued = fit(Floco(Net, CLASSES, 2, 1, optimizer=sgd), run_dir="stopped")
    assert same(whole.run.server.state_dict(), continued.run.server.state_dict())
    assert same(whole.client_module(2).export_state(), continued.client_module(2).export_state())


def test_points_do_not_depend_on_the_order_of_clients() -> None:
    vectors, order = torch.randn(7, 40, dtype=torch.float64), torch.randperm(7)
    torch.testing.assert_close(spread(principal_scores(vectors, 4))[order], spread(principal_scores(vectors[order], 4)))
    scores = principal_scores(vectors, 4)
    centered = vectors - vectors.mean(dim=0)
    assert scores.square().sum() == pytest.approx(torch.linalg.svdvals(centered)[:4].square().sum().item())


def test_projections_are_the_nearest_points() -> None:
    """Against many points of the simplex."""
    points = torch.randn(5, 3)
    nearest = projected(points, 0.5) * 0.5
    torch.testing.assert_close(nearest.sum(dim=1), torch.full((5,), 0.5))
    others = torch.distributions.Dirichlet(torch.ones(3)).sample((2000,)) * 0.5
    assert ((points - nearest).norm(dim=1) <= torch.cdist(points, others).amin(dim=1) + 1e-6).all()


def test_fewer_clients_than_corners_are_refused() -> None:
    with pytest.raises(FederationError, match="projects 3 clients on 10 principal components"):
        fit(Floco(Net, CLASSES, optimizer=sgd))


def test_a_single_client_that_arrives_in_the_round_of_points_is_too_few() -> None:
    """Its point would have one coordinate."""
    server = built(tau=1).new_server(new_data(4, 100).clients)
    server.on_round_start(1, [])
    with pytest.raises(FederationError, match="3 principal components, but updates of 1 arrived"):
        cast(SimplexServer, server).update_clients([0])


@pytest.mark.parametrize(("rounds", "said"), [(2, True), (3, False)])
def test_a_run_in_which_nobody_trains_at_its_place_says_so(rounds: int, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    fit(Floco(Net, CLASSES, 2, 2, optimizer=sgd), rounds=rounds)
    assert ("Floco's tau is 2 and the run has 2 rounds: no client trains at its point" in capsys.readouterr().out) == said


def test_a_head_whose_weight_is_computed_is_refused() -> None:
    class NormedNet(Net):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            weight_norm(self.head)

    with pytest.raises(
        FederationError, match=r"The weight of layer 'head' is computed .* expected a parameter to make a simplex of"
    ):
        Floco(NormedNet, CLASSES, 2).for_client(INFO)


def test_a_head_of_several_layers_is_refused() -> None:
    class DeepHead(Net):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            self.head = torch.nn.Sequential(torch.nn.BatchNorm1d(self.head.in_features), self.head)  # type: ignore[assignment]

    with pytest.raises(FederationError, match="makes a simplex of the head, a Sequential: give a network with a linear one"):
        Floco(DeepHead, CLASSES, 2).for_client(INFO)
