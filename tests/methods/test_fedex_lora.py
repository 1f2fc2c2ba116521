"""FedEx-LoRA: HOMLoRA whose averaging error goes into the frozen matrices."""

from typing import Any

import torch
from tiny import Recording, new_texts, private_states, same
from tiny_adapters import LAYER, WIDTH, A, B, fit, method_of, of_size

from lightning_fed.core import ClientUpdate
from lightning_fed.methods import FedExLoRA, HOMLoRA
from lightning_fed.methods.fedex_lora import MeanAndError

OPTIONS: dict[str, Any] = {"r": 1, "lora_alpha": 2.0}


def test_the_factors_of_the_first_round_are_homloras() -> None:
    """Bit for bit; those of the second are not, for the matrices have moved."""
    for rounds in (1, 2):
        own, homlora = (fit(method_of(method, **OPTIONS), rounds=rounds).run.server.state for method in (FedExLoRA, HOMLoRA))
        assert same({name: own[name] for name in homlora}, homlora) == (rounds == 1)
        assert len(own) > len(homlora)


def test_one_client_is_homlora() -> None:
    """Nothing to correct: weights, moments and results, bit for bit."""
    own, homlora = (fit(method_of(method, **OPTIONS), new_texts(1, 60), rounds=3) for method in (FedExLoRA, HOMLoRA))
    assert same(own.run.server.state_dict(), homlora.run.server.state_dict())
    assert same(private_states(own)[0], private_states(homlora)[0])
    assert own.run.results == homlora.run.results


def test_with_one_a_for_all_there_is_no_error() -> None:
    """As in FFA-LoRA: whatever B is, in a hundred rounds nothing is added."""
    method = method_of(FedExLoRA, **OPTIONS)
    method.configure_model()
    server = method.configure_server([])
    combine = MeanAndError(method.matrices)
    names = set(server.state)
    state = dict(server.state)
    for _ in range(100):
        state = combine([({**state, B: torch.randn(WIDTH, 1)}, float(k + 1)) for k in range(3)], state)
        assert state.keys() == names


def test_the_error_has_the_scale_in_it() -> None:
    """Two clients, (1, 2), (1, 0, 1) and (3, 0), (0, 2, 1): with s = 2 the matrix moves by twice the error."""
    method = method_of(FedExLoRA, **OPTIONS)
    method.configure_model()
    server = method.configure_server([])
    pairs = [([1, 2], [1, 0, 1]), ([3, 0], [0, 2, 1])]
    updates = [
        ClientUpdate(k, 1, server.state | {A: of_size([a], 1, WIDTH), B: of_size([[v] for v in b], WIDTH, 1)})
        for k, (b, a) in enumerate(pairs)
    ]
    server.aggregate(iter(updates))
    change = method.matrices.change(server.state, LAYER)
    assert change is not None
    assert torch.equal(change, 2 * of_size([[-0.5, 1, 0], [0.5, -1, 0]], WIDTH, WIDTH))
    assert torch.equal(server.state[A], of_size([[0.5, 1, 1]], 1, WIDTH))
    assert torch.equal(server.state[B], of_size([[2], [1]], WIDTH, 1))


def test_errors_add_up_on_the_wire() -> None:
    """Two more ranks in each round; with four, factors would be 64 numbers: then the matrix is sent."""
    engine = Recording()
    fit(method_of(FedExLoRA, **OPTIONS), rounds=3, engine=engine)
    first, second, third = (engine.fits(round)[0][0].broadcast.state for round in (1, 2, 3))
    assert not any(".change" in name for name in first)
    assert (second[f"{LAYER}.change_left"].shape, second[f"{LAYER}.change_right"].shape) == ((WIDTH, 2), (2, WIDTH))
    assert third[f"{LAYER}.change"].shape == (WIDTH, WIDTH)
    assert f"{LAYER}.change_left" not in third
