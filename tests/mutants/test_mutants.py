"""Mutants are only worth something as long as what they replace is there."""

import mutate


def test_every_mutant_can_be_made_and_has_its_tests() -> None:
    found = mutate.mutants()
    assert len(found) > 100
    assert [f"{mutant.id}: {why}" for mutant in found if (why := mutate.obstacle(mutant, mutate.ROOT))] == []
