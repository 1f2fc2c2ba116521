"""One file per method. Every module of this folder is imported, so that its classes can be named in a configuration
(``--model FedAvg``) and are picked up by the tests.
"""

import importlib
import pkgutil

from lightning_fed.core import FederatedModule

for _module in pkgutil.iter_modules(__path__):
    _found = importlib.import_module(f"{__name__}.{_module.name}")
    globals().update(
        {
            name: value
            for name, value in vars(_found).items()
            if isinstance(value, type) and issubclass(value, FederatedModule) and value.__module__ == _found.__name__
        }
    )

__all__ = sorted(
    name
    for name, value in globals().items()
    if isinstance(value, type) and issubclass(value, FederatedModule) and value is not FederatedModule
)
