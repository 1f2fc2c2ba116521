"""Options in environment variables, such as ``LIGHTNING_FED_FIT__FEDERATION__ROUNDS``: they are printed and checked."""

import os
import sys
from typing import Any

from lightning_fed.errors import FederationError

PREFIX = "LIGHTNING_FED"


def check_variables(verb: str, parser: Any) -> None:
    """Print on standard error which options come from the environment, so that a forgotten variable is noticed.

    Raises:
        FederationError: for a variable that belongs to no option.
    """
    options = {action.dest.replace(".", "__").upper(): action.dest for action in parser._actions if action.option_strings}
    start = f"{PREFIX}_{verb.upper()}__"
    for variable, value in sorted((name, value) for name, value in os.environ.items() if name.startswith(start)):
        name = variable.removeprefix(start)
        if name not in options:
            block = name.partition("__")[0]
            raise FederationError(
                f"{variable} is set, but {verb} has no such option: unset it"
                + (f", or give {start}{block} a YAML file." if block in ("MODEL", "DATA") else ".")
            )
        print(f"lightning-fed: {options[name]} is {value} unless set otherwise ({variable}).", file=sys.stderr)
