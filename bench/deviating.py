"""A plugin of pytest that plays a deviation of ``deviations.py`` in place of its method: ``DEVIATION=3 pytest -p deviating``, with
``tests`` and ``bench`` on the path. It is not in ``tests``, where pytest would import it to look for doctests.
"""

import inspect
import os
import sys
from functools import partial
from typing import Any

from deviations import DEVIATIONS

import lightning_fed.methods

deviation = DEVIATIONS[int(os.environ["DEVIATION"])]
ours, theirs = deviation.ours, deviation.theirs


def with_other_options(options: dict[str, Any]) -> type:
    """The method with these options, whatever a test gives for them."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        names = list(inspect.signature(ours).parameters)
        ours.__init__(self, **dict(zip(names, args, strict=False)) | kwargs | options)

    return type(ours.__name__, (ours,), {"__init__": init, "__module__": ours.__module__})


if isinstance(theirs, partial):
    theirs = with_other_options(theirs.keywords)
for module in (lightning_fed.methods, sys.modules[ours.__module__]):
    setattr(module, ours.__name__, theirs)
