"""Numbers as people read them."""

import pytest

from lightning_fed.formatting import THIN, amount, grouped, ordinal


def test_digits_come_in_groups_with_thin_separators() -> None:
    assert grouped(1234567) == f"1{THIN}234{THIN}567"
    assert (grouped(12.345, 1), grouped(999), grouped(-1234.5, 1)) == ("12.3", "999", f"-1{THIN}234.5")


def test_amounts_go_on_a_screen() -> None:
    assert amount(999_999_999) == f"999{THIN}999{THIN}999"
    assert amount(1_234_567_890) == "1.235e+09"


@pytest.mark.parametrize(("number", "said"), [(2, "2nd"), (3, "3rd"), (11, "11th"), (12, "12th"), (21, "21st"), (30, "30th")])
def test_ordinals(number: int, said: str) -> None:
    assert ordinal(number) == said
