"""Updates that no client of ours sends: refused in front of every server, with client and tensor, before anything looks at them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from often import FEW, mostly_slow
from tiny import METHODS, data_for, new_data, new_federation, new_method
from tiny_rounds import Changing, check_update
from torch import Tensor

from lightning_fed.core.aggregation import check_form
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.engines import InProcess
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.tensors import State

Tampering = Callable[[ClientUpdate], ClientUpdate | None]
"""Makes another update of one; None if it has nothing to be changed so."""


class Own(Tensor):
    """A tensor of somebody's own class."""


def one(change: Callable[[Tensor], Any]) -> Tampering:
    """Change the first tensor of numbers."""

    def tampered(update: ClientUpdate) -> ClientUpdate | None:
        name = next((name for name, t in update.state.items() if t.is_floating_point() and t.numel() > 1), None)
        return None if name is None else replace(update, state=update.state | {name: change(update.state[name])})

    return tampered


def each(change: Callable[[Tensor], Any]) -> Tampering:
    """Change all of them."""
    return lambda update: replace(update, state={k: change(t) for k, t in update.state.items()}) if update.state else None


def renamed(change: Callable[[str], Any]) -> Tampering:
    return lambda update: replace(update, state={change(k): t for k, t in update.state.items()}) if update.state else None


def with_metrics(**metrics: Any) -> Tampering:
    return lambda update: replace(update, metrics=update.metrics | {k.replace("_", "/"): v for k, v in metrics.items()})


def examples(value: Any) -> Tampering:
    return lambda update: replace(update, num_examples=value)


def given_back(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


NAN = float("nan")
TAMPERED: dict[str, Tampering] = {
    "nothing": lambda update: replace(update, state={}) if update.state else None,
    "less": lambda update: replace(update, state=dict(list(update.state.items())[1:])) if update.state else None,
    "more": lambda update: replace(update, state=update.state | {"more": torch.zeros(2)}),
    "a name of a megabyte": lambda update: replace(update, state=update.state | {"x\n" * 2**19: torch.zeros(2)}),
    "5,000 digits": lambda update: replace(update, state=update.state | {"prototype/" + "9" * 5000: torch.zeros(2)}),
    "a number as a name": lambda update: replace(update, state=update.state | {3: torch.zeros(2)}),  # type: ignore[dict-item]
    "other names": renamed(lambda name: f"{name}x"),
    "numbers as names": renamed(len),
    "twice as long": one(lambda t: torch.cat([t.flatten(), t.flatten()])),
    "another dimension": one(lambda t: t[None]),
    "a column": one(lambda t: t.reshape(-1, 1)[None]),
    "a scalar": one(lambda t: torch.zeros(())),
    "empty": one(lambda t: torch.zeros(0)),
    **{f"in {dtype}": one(lambda t, dtype=dtype: t.to(dtype)) for dtype in (torch.half, torch.double, torch.int32, torch.bool)},
    "complex": one(lambda t: t.to(torch.complex64)),
    "NaN": one(lambda t: torch.full_like(t, NAN)),
    "infinity": one(lambda t: torch.full_like(t, -torch.inf)),
    "sparse": one(Tensor.to_sparse),
    "sparse rows": one(lambda t: t.reshape(1, -1).to_sparse_csr()),
    "meta": one(lambda t: t.to("meta")),
    "quantised": one(lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)),
    "nested": one(lambda t: torch.nested.nested_tensor([torch.zeros(2)])),
    "expanded": one(lambda t: torch.zeros(()).expand(t.shape)),
    "overlapping": one(lambda t: torch.zeros(t.numel() + 1).as_strided((t.numel(), 2), (1, 1))),
    "memory given back": one(given_back),
    "with a gradient": one(lambda t: t.clone().requires_grad_()),
    "out of a graph": one(lambda t: t.clone().requires_grad_() * 1),
    "of a class of its own": one(lambda t: t.as_subclass(Own)),
    "a list": one(Tensor.tolist),
    "an array": one(Tensor.numpy),
    "None": one(lambda t: None),
    "all None": each(lambda t: None),
    "all lists": each(Tensor.tolist),
    "all meta": each(lambda t: t.to("meta")),
    "all sparse": each(Tensor.to_sparse),
    "all scalars": each(lambda t: torch.zeros((), dtype=t.dtype)),
    "all empty": each(lambda t: torch.zeros(0, dtype=t.dtype)),
    "all double": each(Tensor.double),
    "all with another dimension": each(lambda t: t[None]),
    "all twice as long": each(lambda t: torch.cat([t, t]) if t.dim() else t[None]),
    "a list as a payload": lambda update: replace(update, state=list(update.state)),  # type: ignore[arg-type]
    "no payload": lambda update: replace(update, state=None),  # type: ignore[arg-type]
    "no metrics": lambda update: replace(update, metrics=None),  # type: ignore[arg-type]
    "no FLOPs": lambda update: replace(update, metrics={}),
    "a number as a metric's name": lambda update: replace(update, metrics=update.metrics | {5: 1.0}),  # type: ignore[dict-item]
    **{f"FLOPs of {value!r}"[:30]: with_metrics(flops=value) for value in ("1", True, None, NAN, -1.0, torch.inf, 10**400, [])},
    "a metric's name in two lines": lambda update: replace(update, metrics=update.metrics | {"val/a\nround,1": 1.0}),
    "a metric's name that a terminal obeys": lambda update: replace(update, metrics=update.metrics | {"val/\x1b[2J": 1.0}),
    "a metric's name of a megabyte": lambda update: replace(update, metrics=update.metrics | {"val/" + "x" * 2**20: 1.0}),
    "ten thousand metrics": lambda update: replace(update, metrics=update.metrics | {f"val/{k}": 1.0 for k in range(10_000)}),
    "FLOPs of which sums are infinite": with_metrics(flops=1.7e308),
    "a loss of NaN": with_metrics(train_loss=NAN),
    "a tensor as a loss": with_metrics(train_loss=torch.tensor(1.0)),
    "a text as an accuracy": with_metrics(val_accuracy="high"),
    "True as an accuracy": with_metrics(test_accuracy=True),
    **{f"of {value!r} examples"[:30]: examples(value) for value in (-1, 0, True, None, "10", NAN, 10.0, 10**30, 10_000)},
}


class Forging(InProcess):
    """Shows the server a round's first update in all kinds of ways, and at last as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.federation: Federation | None = None
        self.tried: set[str] = set()
        self.wrong: dict[str, str] = {}

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        asked: list[Turn] = []

        def noted() -> Iterator[Turn]:
            for turn in turns:
                asked.append(turn)
                yield turn

        for update in super().run(noted()):
            if asked[-1].verb == "fit" and not self.tried and isinstance(update, ClientUpdate):
                self._forge(asked[-1], update)
            yield update

    def _forge(self, turn: Turn, update: ClientUpdate) -> None:
        assert self.federation is not None
        for name, tamper in TAMPERED.items():
            if (tampered := tamper(update)) is None:
                continue
            self.tried.add(name)
            try:
                check_form(tampered, "flops")
                self.federation.run.server.check(tampered, turn.broadcast, turn.client)
                self.wrong[name] = "was taken in"
            except FederationError as error:
                said = str(error)
                if f"client {update.client}" not in said or "\n" in said or len(said) > 400:
                    self.wrong[name] = said[:400]
            except Exception as error:
                self.wrong[name] = repr(error)


@pytest.mark.parametrize("method", mostly_slow(METHODS, FEW))
@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors|quantiz|quantize):UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_no_server_sees_an_update_that_was_tampered_with(method: str) -> None:
    engine = Forging()
    engine.federation = new_federation(1, participation=0.4, evaluate_every=0, engine=engine)
    engine.federation.fit(new_method(method), data_for(method, num_clients=3, size=60))
    assert engine.wrong == {}
    assert engine.tried == TAMPERED.keys() or method in {"Standalone", "FD", "FedProto"} or len(engine.tried) > 20


def test_an_update_that_was_not_is_taken_in() -> None:
    """Whatever its strides, with a size of one or none, and with a measurement of which there is no number."""
    state = {"a": torch.zeros(3, 4).T, "b": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), "c": torch.zeros(0, 3)}
    state |= {"d": torch.nn.Parameter(torch.zeros(2), requires_grad=False), "e": torch.zeros(1).expand(1, 1, 1)}
    state |= {"f": torch.zeros(()), "g": torch.arange(12.0).view(3, 4)[::2, 1:3]}
    check_update(ClientUpdate(0, 1, state, {"val/accuracy": NAN, "train/loss": 1, "flops": 2.0}), state)


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("verb", "tamper", "message"),
    [
        ("evaluate", with_metrics(test_accuracy="high"), "client -1 has the metric 'test/accuracy' = 'high'"),
        ("compute_statistics", with_metrics(batches=NAN), "client 0 has the metric 'batches' = nan"),
        ("compute_statistics", lambda update: replace(update, metrics={}), "client 0 lacks the metric 'batches'"),
        ("compute_statistics", each(lambda t: t[None]), "client 0 has .* of shape"),
        ("compute_statistics", each(lambda t: torch.full_like(t, NAN) if t.is_floating_point() else t), "client 0 holds NaN"),
        ("compute_statistics", renamed(lambda name: f"{name}x"), "client 0 lacks"),
    ],
)
def test_what_is_measured_or_gathered_is_checked_too(verb: str, tamper: Tampering, message: str) -> None:
    engine = Changing(lambda turn, update: (tamper(update) or update) if turn.verb == verb else update)
    with pytest.raises(FederationError, match=message):
        new_federation(1, engine=engine).fit(new_method("HeteroFL"), new_data(2, 40))


def test_form_alone_says_nothing_about_names_and_shapes() -> None:
    state: State = {"whatever": torch.zeros(3)}
    check_form(ClientUpdate(0, 0, state))
    with pytest.raises(FederationError, match="lacks the metric 'flops'"):
        check_form(ClientUpdate(0, 0, state), "flops")
