"""What surrounds runs when several are under way in one process, and do not end in the order in which they began."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, _GeneratorContextManager, contextmanager
from functools import wraps
from threading import Lock


def while_any(surrounding: Callable[[], AbstractContextManager[None]]) -> Callable[[], _GeneratorContextManager[None]]:
    """A surrounding that is there while somebody is in it: the first one enters it, the last one leaves it. Each by itself would
    put back what it found, which another one had changed.
    """
    lock, entered = Lock(), ExitStack()
    inside = 0

    @contextmanager
    @wraps(surrounding)
    def shared() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                entered.enter_context(surrounding())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    entered.close()

    return shared
