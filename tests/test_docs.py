"""What the documentation says of the code. The program of docs/phases.md is run in test_phases.py."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny import CLASSES, Net, momentum, new_data, new_federation, same

from lightning_fed.exchange import State
from lightning_fed.methods import FedAvg
from lightning_fed.module import FederatedModule

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
assert {"README.md", "decisions.md", "fedavg.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:bench|configs|docs|examples|lightning_fed|tests)/[\w./]+)`", text)
    linked = re.findall(r"\]\(((?!https?:)[^)#]+)[^)]*\)", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [path for path in linked if not (page.parent / path).exists()] == []


def test_the_programs_of_the_page_on_networks_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "networks.md"
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(code, str(page), "exec"), {"__name__": "networks"})
    assert float(capsys.readouterr().out) > 0


@pytest.fixture
def fedprox(monkeypatch: pytest.MonkeyPatch) -> type[FederatedModule]:
    """The method of CONTRIBUTING.md, from a file outside the package."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    module = ModuleType("my_lab")
    monkeypatch.setitem(sys.modules, "my_lab", module)
    exec(compile(code, "my_lab.py", "exec"), vars(module))
    return module.FedProx


def test_the_method_of_the_guide_is_what_it_says(fedprox: type[FederatedModule]) -> None:
    def state_after(method: FederatedModule) -> State:
        federation = new_federation(2, evaluate_every=0)
        federation.fit(method, new_data(3, 120))
        return federation.run.server.state

    plain = state_after(FedAvg(Net, CLASSES, momentum))
    assert same(state_after(fedprox(Net, CLASSES, 0.0, momentum)), plain)
    assert not same(state_after(fedprox(Net, CLASSES, 0.5, momentum)), plain)
