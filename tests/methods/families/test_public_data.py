"""Methods whose clients or server learn from public data: what all of them have in common."""

import pytest
import torch
from tiny import CLASSES, new_data, new_method
from tiny_public import fit, losing, public, with_public

from lightning_fed.errors import FederationError
from lightning_fed.testing.compare import unequal_ends

each_method = pytest.mark.parametrize("name", ["DSFL", "FedDF", "FedET"])


@each_method
def test_labels_of_public_data_are_nobodys(name: str) -> None:
    one, other = (
        fit(new_method(name), with_public(2, 60, public=public(labels)), rounds=1) for labels in (None, torch.arange(50) % CLASSES)
    )
    assert not unequal_ends(one, other)


@each_method
def test_without_public_data_it_is_refused_before_the_first_round(name: str) -> None:
    with pytest.raises(FederationError, match="needs public data, and there are none"):
        fit(new_method(name), new_data(2, 60))


@pytest.mark.parametrize(("name", "place"), [("DSFL", 0), ("FedDF", 0), ("FedDF", 1), ("FedET", 0)])
def test_the_servers_own_turns_must_not_be_lost(name: str, place: int) -> None:
    """Neither the first nor the last."""
    with pytest.raises(FederationError, match="The server's own turns of round 1 were lost"):
        fit(new_method(name), engine=losing(servers=True, place=place))
