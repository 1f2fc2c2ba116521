"""FLoRA by stacking: adapters that live for one round."""

import torch
from tiny import Recording, new_texts, same
from tiny_adapters import LAYER, WIDTH, A, B, fit, method_of, of_factor

from lightning_fed.core import State
from lightning_fed.methods import FLoRA, HOMLoRA
from lightning_fed.methods.flora import START, draw_adapters


def starts(ranks: list[int] | None = None, seed: int = 0) -> list[list[State]]:
    """The adapters that the clients begin with, in three rounds."""
    begun: list[list[State]] = [[], [], []]

    class Noting(FLoRA):
        def on_fit_start(self) -> None:
            super().on_fit_start()
            factors = {name: tensor.clone() for name, tensor in self.state_dict().items() if ".lora_" in name}
            begun[self.rounds_before].append(factors)

    fit(method_of(Noting, **({"ranks": ranks} if ranks else {"r": 3})), new_texts(3, 90), rounds=3, seed=seed)
    return begun


def test_adapters_are_new_in_each_round_and_the_same_for_all() -> None:
    rounds = starts()
    for begun in rounds:
        assert len(begun) == 3
        for state in begun:
            assert same(state, begun[0])
            assert not any(tensor.any() for tensor in of_factor(state, "B").values())
            for tensor in of_factor(state, "A").values():
                assert tensor.abs().max() <= WIDTH**-0.5
                assert tensor.std() > 0.5 * (3 * WIDTH) ** -0.5
    first, second, third = (begun[0][A] for begun in rounds)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert not torch.equal(first, starts(seed=1)[0][0][A])
    values = list(of_factor(rounds[0][0], "A").values())
    assert not torch.equal(values[0], values[1])


def test_smaller_ranks_have_the_first_rows() -> None:
    one, three, again = starts([1, 3])[1]
    assert torch.equal(one[A], three[A][:1])
    assert same(one, again)


def test_an_adapter_is_a_seed_on_the_wire() -> None:
    engine = Recording()
    federation = fit(method_of(FLoRA, r=1), engine=engine)
    for turn, update in engine.fits():
        assert not any(".lora_" in name for name in turn.broadcast.state)
        assert turn.broadcast.state[START].dtype == torch.int64
        assert START not in update.state
    assert not any(".lora_" in name for name in federation.run.server.state_dict())
    matrices = federation.run.model.matrices
    drawn = draw_adapters(matrices, int(federation.run.server.state[START]))
    assert torch.equal(federation.client_module(2).state_dict()[A], drawn[A])


def test_one_client_is_lora_that_begins_again() -> None:
    """What it learned in two rounds adds up; in the second it goes on with nothing but that."""
    engine = Recording()
    federation = fit(method_of(FLoRA, r=1), new_texts(1, 60), rounds=2, engine=engine)
    learned = [update.state for _, update in engine.fits()]
    assert learned[0][B].any()
    assert learned[1][B].any()
    change = federation.run.model.matrices.change(federation.run.server.state, LAYER)
    assert change is not None
    torch.testing.assert_close(change, sum((one[B] @ one[A] for one in learned), torch.zeros(())))
    homlora = fit(method_of(HOMLoRA, r=1), new_texts(1, 60), rounds=2).run.server.state
    assert not torch.allclose(change, homlora[B] @ homlora[A], atol=1e-3)
