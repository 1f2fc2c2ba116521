"""The configurations that come along: in a checkout and in a wheel, found by name, and outranked by what somebody has."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import about, found, shipped

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").rglob("*.yaml"))


def test_every_configuration_has_a_name_and_says_what_it_is() -> None:
    files = shipped()
    assert sorted(files.values()) == FILES
    assert list(files)[:2] == ["quickstart", "quickstart.sweep"]
    assert files["feddecomp/cifar10"] == ROOT / "configs/feddecomp/cifar10.yaml"
    assert min(len(about(path)) for path in files.values()) > 20
    assert about(files["quickstart"]).startswith("Twenty clients with about nine labelled digits each")
    assert not any(about(path).startswith("lightning-fed") for path in files.values())


@pytest.mark.parametrize("given", ["quickstart", "quickstart.yaml", "configs/quickstart.yaml", Path("configs/quickstart.yaml")])
def test_a_name_is_found_in_whatever_form(given: str | Path) -> None:
    assert found(given) == ROOT / "configs/quickstart.yaml"


def test_a_comparison_is_found_where_one_is_asked_for() -> None:
    assert found("quickstart", ".sweep") == found("quickstart.sweep") == ROOT / "configs/quickstart.sweep.yaml"
    assert found("quickstart.yaml", ".sweep") == ROOT / "configs/quickstart.yaml"  # a file's name is not to be guessed at
    assert found("fedprox/cifar10", ".sweep") == ROOT / "configs/fedprox/cifar10.yaml"  # which then is refused for what it lacks


def test_a_file_of_ones_own_comes_first() -> None:
    own = Path("configs/quickstart.yaml")
    own.parent.mkdir()
    own.write_text("federation: {rounds: 1}")
    assert found(own) == found("configs/quickstart.yaml") == own
    assert found("quickstart") == ROOT / "configs/quickstart.yaml"


@pytest.mark.parametrize("unknown", ["quickstrat", "../pyproject", "/etc/hostname.yaml", "fedhm", ""])
def test_what_is_neither_is_said(unknown: str) -> None:
    with pytest.raises(FederationError, match=r"There is no configuration .* lightning-fed configs") as error:
        found(unknown)
    if unknown in ("quickstrat", "fedhm"):
        assert {"quickstrat": "did you mean quickstart?", "fedhm": "fedhm/cifar10"}[unknown] in str(error.value)


class TestBuilt:
    """What somebody installs. The builder is the one that pyproject.toml names."""

    def test_a_wheel_has_the_configurations_and_finds_them(self) -> None:
        wheel = pytest.importorskip("hatchling.builders.wheel")
        [path] = wheel.WheelBuilder(str(ROOT)).build(directory=str(Path.cwd()), versions=["standard"])
        with zipfile.ZipFile(path) as built:
            names = set(built.namelist())
            built.extractall("site")
        assert {f"lightning_fed/{path.relative_to(ROOT)}" for path in FILES} <= names
        assert "lightning_fed/py.typed" in names
        assert {name.split("/")[0].partition("-")[0] for name in names} == {"lightning_fed"}
        code = "from lightning_fed.experiments.configs import found; print(found('quickstart'))"
        done = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, 'site'); {code}"], capture_output=True)
        assert Path(done.stdout.decode().strip()) == Path("site/lightning_fed/configs/quickstart.yaml").absolute(), done.stderr

    def test_a_source_distribution_has_all_that_its_tests_need(self) -> None:
        sdist = pytest.importorskip("hatchling.builders.sdist")
        [path] = sdist.SdistBuilder(str(ROOT)).build(directory=str(Path.cwd()), versions=["standard"])
        with tarfile.open(path) as built:
            names = {name.partition("/")[2] for name in built.getnames()}
        expected = {str(path.relative_to(ROOT)) for room in ("configs", "docs", "tests") for path in (ROOT / room).rglob("*.*")}
        assert {name for name in expected if "__pycache__" not in name} <= names
        assert {"pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "bench/long_run.py"} <= names
