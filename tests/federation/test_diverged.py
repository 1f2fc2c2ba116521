"""What is said of a training that diverged: the rates, and what else of a method was chosen."""

import pytest
from tiny import CLASSES, Net, new_data, new_federation

from lightning_fed.core.hparams import chosen_numbers
from lightning_fed.errors import FederationError
from lightning_fed.methods import SCAFFOLD, FedAvg, FedProx


@pytest.mark.parametrize(("method", "option"), [(FedProx, "mu"), (SCAFFOLD, "server_lr")])
def test_the_number_that_was_chosen_is_named(method: type[FedAvg], option: str) -> None:
    """One diverges on clients, the other on the server."""
    with pytest.raises(FederationError, match=rf"diverged; lower the learning rate.*, change model.{option}=1e\+30, or set"):
        new_federation(3).fit(method(Net, CLASSES, epochs=2, **{option: 1e30}), new_data(2))


def test_what_is_as_usual_or_counts_things_is_no_cause() -> None:
    assert chosen_numbers(FedProx(Net, CLASSES, epochs=7, gradient_clip=3.0)) == {}
    assert chosen_numbers(SCAFFOLD(Net, CLASSES, server_lr=1.0)) == {}
    assert chosen_numbers(SCAFFOLD(Net, CLASSES, server_lr=0.5)) == {"server_lr": 0.5}
