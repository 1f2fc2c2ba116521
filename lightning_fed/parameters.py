"""What classes and functions take by name."""

import inspect
from typing import Any


def parameters_of(thing: Any) -> dict[str, tuple[inspect.Parameter, Any]]:
    """What a class or a function takes by name, and the function that says so. A class that passes on what it does not know takes
    what its base takes.
    """
    makers = [vars(kind)["__init__"] for kind in thing.__mro__ if "__init__" in vars(kind)] if isinstance(thing, type) else [thing]
    found: dict[str, tuple[inspect.Parameter, Any]] = {}
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        found = {p.name: (p, maker) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)} | found
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    found.pop("self", None)
    return found
