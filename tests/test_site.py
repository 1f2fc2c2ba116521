"""What the documentation's generators write, and what a package index and a host are told. .ci/docs builds the site itself."""

import csv
import inspect
import os
import re
import socket
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml
from generators import api, differences, gallery, links, options

import lightning_fed
from lightning_fed import methods
from lightning_fed.experiments.configs import found
from lightning_fed.federation.federation import Federation

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
assert {"ci.yml", "docs.yml", "release.yml"} <= {path.name for path in WORKFLOWS}


# ---------------------------------------------------------------------------------------------------------------- methods


def test_the_table_of_the_readme_is_that_of_the_pages() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == gallery.rendered(readme, gallery.methods()), "python docs/generators/gallery.py"


def test_every_method_is_on_one_page_and_says_which_networks_it_takes() -> None:
    found = gallery.methods()
    assert sorted(method.name for method in found) == methods.__all__
    for method in found:
        assert (method.networks == "any") == getattr(methods, method.name).heterogeneous, method.name


def test_formulas_are_readable_where_nothing_sets_them() -> None:
    pytest.importorskip("pylatexenc", reason="of the site alone")
    from generators import formulas

    tex = r"\(\bar w \ne \tfrac{1}{2} &lt; v_k\)"
    said = formulas.readable(f'with <span class="math notranslate nohighlight">{tex}</span>,')
    assert said == f'with <span class="math notranslate nohighlight" data-text="w̅≠1/2 &lt; v_k">{tex}</span>,'
    assert formulas.text(r"\frac{a + b}{c}") == "(a + b)/c"
    assert formulas.text("w_{k+1}") == "w_(k+1)"
    with pytest.raises(ValueError, match=r"how \\unheard reads"):
        formulas.text(r"\unheard{x}")


def test_a_page_without_a_head_is_none_of_a_method() -> None:
    Path("one.md").write_text("---\nmethods:\n  One: {kind: references, networks: any, travels: 'a | b'}\n---\n# One\n")
    Path("other.md").write_text("# Other\n\n---\n")
    [one] = gallery.methods(Path.cwd())
    assert (one.name, one.page, one.year) == ("One", "one", None)
    assert gallery.table([one]).splitlines()[-1] == "| [`One`](docs/methods/one.md) | any | a | b |"


def test_cards_have_the_first_sentence_of_the_class() -> None:
    text = gallery.cards(gallery.methods())
    assert text.count(":::{grid-item-card}") == len(methods.__all__)
    assert "FedAvg with a proximal term that keeps local models near the server's $w^t$" in text


def test_what_public_code_does_differently_is_that_of_the_methods_pages_and_of_what_was_measured() -> None:
    """A measured deviation is told of on its method's page, and the test that it names is there."""
    text = (ROOT / "docs" / "differences.md").read_text()
    assert text == differences.rendered(text), "python docs/generators/differences.py"
    told = {method.name: differences.section(gallery.PAGES / f"{method.page}.md") for method in gallery.methods()}
    all_of_them = differences.sections()
    told_of = [page.stem for page in gallery.PAGES.glob("*.md") if differences.section(page)]
    assert all(f"](methods/{page}.md)\n" in all_of_them for page in told_of)
    rows = list(csv.DictReader(differences.RESULTS.read_text().splitlines()))
    assert rows
    for row in rows:
        assert row["code"] in (told[row["method"]] or ""), row
        path, _, name = row["test"].partition("::")
        [file] = (ROOT / "tests").rglob(path)
        assert f"def {name}(" in file.read_text(), row


# ---------------------------------------------------------------------------------------------------------------- options


@cache
def section(what: str) -> str:
    return options.section(what)


@pytest.mark.parametrize("function", [L.Trainer.__init__, Federation.__init__, Federation.export], ids=lambda f: f.__qualname__)
def test_commands_have_every_option(function: Any) -> None:
    block = {L.Trainer.__init__: "trainer.", Federation.__init__: "federation."}.get(function, "")
    given_otherwise = {"self", "trainer", "seed", "model", "datamodule"}
    wanted = [f"\n`--{block}{name}` (`" for name in inspect.signature(function).parameters.keys() - given_otherwise]
    assert [option for option in wanted if option not in section("commands")] == []


def test_commands_that_wait_for_no_torch_are_there() -> None:
    assert "\n`--workers` (`number from 1 on`, default `1`)\n: number of parallel runs" in section("commands")
    assert "\n`--equal` (`'rounds' | 'bytes' | 'flops'`)\n" in section("commands")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what == "methods" else what for what in options.CLASSES]
)
def test_classes_have_every_option(what: str) -> None:
    common, *parts = re.split(r"^## ", section(what), flags=re.MULTILINE)[1:]
    found = {part.split("\n")[0]: part for part in parts}
    if not common.startswith("Options of all"):
        found, common = {common.split("\n")[0]: common} | found, ""
    for cls in options.named(*options.CLASSES[what]):
        wanted = [f"\n`--{name}` (`" for name in inspect.signature(cls).parameters if name not in ("args", "kwargs")]
        assert [option for option in wanted if option not in found[cls.__name__] + common] == [], cls.__name__


def test_types_are_written_as_one_reads_them() -> None:
    parser = options.parser_for(methods.PFedLoRA)
    kinds = {options.name_of(action): options.kind_of(action) for action in options.shown(parser)}
    assert kinds["--adapter"] == "'reduction' | 'factorized'"
    assert (kinds["--optimizer"], kinds["--gradient_clip"]) == ("Optimizer", "PositiveFloat | None")
    assert kinds["--backbone"] == "list[ImportPath | TrainableNetwork] | ImportPath | TrainableNetwork"


# -------------------------------------------------------------------------------------------------------------------- API


def test_every_public_name_has_a_page_and_a_text() -> None:
    assert {"lightning_fed", "lightning_fed.methods", "lightning_fed.data", "lightning_fed.nn"} <= set(api.packages())
    index = (ROOT / "docs" / "api" / "index.md").read_text()
    seen = set[str]()
    for module in api.pages():
        page = ROOT / "docs" / "api" / f"{module}.md"
        assert f"<!-- generated: api {module} -->" in page.read_text(), module
        assert f"\n{module}\n" in index
        home, shown = (
            import_module(module),
            re.findall(r"^\.\. auto(?:class|function|data):: (\w+)$", api.page(module), re.MULTILINE),
        )
        assert seen.isdisjoint(shown), "each name is on one page"
        seen.update(shown)
        assert set(getattr(home, "__all__", shown)) <= seen
        for value in (getattr(home, name) for name in shown):
            assert not (inspect.isclass(value) or inspect.isfunction(value)) or value.__doc__, value
    assert {path.stem for path in (ROOT / "docs" / "api").glob("*.md")} == {"index", *api.pages()}


# ------------------------------------------------------------------------------------------------------------------ links


def test_links_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](docs/results.md#digits) [b](CONTRIBUTING.md#style) [c](configs/quickstart.yaml) [d](LICENSE) [e](https://x.y) [f](#g)"
    )
    there = links.rebased(text, ROOT, ROOT / "docs" / "tutorials" / "first.md")
    assert there == "[a](../results.md#digits) [b](../contributing.md#style) c d [e](https://x.y) [f](#g)"


def test_links_that_lead_nowhere_are_found() -> None:
    Path("a.html").write_text('<p id="here"></p><a href="b.html#there"></a><a href="#here"></a><img src="https://x.y/z.png">')
    Path("b.html").write_text('<p id="there"></p>')
    assert links.broken(Path.cwd()) == []
    Path("b.html").write_text('<a href="c.html"></a>')
    assert sorted(links.broken(Path.cwd())) == ["a.html: b.html#there", "b.html: c.html"]


def test_an_index_gets_no_links_into_the_repository() -> None:
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.plugin.manager import PluginManager

    metadata = ProjectMetadata(str(ROOT), PluginManager()).core
    assert metadata.readme_content_type == "text/markdown"
    shown = re.findall(r"(?:\]\(|src=\")([^)\"]+)", metadata.readme)
    assert [link for link in shown if not link.startswith(("https://", "#"))] == []
    assert "FedAvg" in metadata.readme


# --------------------------------------------------------------------------------------------------------------- metadata


def test_files_agree_on_what_the_project_is() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (lightning_fed.__version__, PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_what_they_use_and_may_do_little(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (.*)", text)
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*", line)] == []


def test_workflows_try_the_versions_that_are_promised() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["tests"]["strategy"]["matrix"]["python"] == promised
    assert f">={promised[0]}" == PROJECT["requires-python"]


def test_the_form_of_a_bug_asks_for_what_a_run_records() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {field["id"]: field for field in form["body"] if "id" in field}
    assert {"config", "versions"} <= fields.keys()
    assert "config.yaml" in fields["config"]["attributes"]["label"]


def test_commands_of_notebooks_are_forks_of_one_process(tmp_path: Path) -> None:
    """Each with its own arguments, folder, environment, output and exit code."""
    program, command, address = DOCS / "commands.py", tmp_path / "lightning-fed", tmp_path / "commands"
    command.symlink_to(program)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        server = subprocess.Popen([sys.executable, program, str(listener.fileno())], pass_fds=[listener.fileno()])
        with ExitStack() as at_end:
            at_end.callback(server.wait)
            at_end.callback(server.kill)

            def run(*args: str, program: Path = command, **environment: str) -> subprocess.CompletedProcess[str]:
                variables = os.environ | {"LIGHTNING_FED_COMMANDS": str(address)} | environment
                return subprocess.run(
                    [sys.executable, program, *args], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100
                )

            assert run("--version").stdout.split()[0] == "lightning-fed"
            (tmp_path / "q.yaml").write_text(Path(found("quickstart")).read_text())
            variable = "LIGHTNING_FED_FIT__FEDERATION__TARGET"
            given = run("fit", "--config", "q.yaml", "--print_config", **{variable: "0.5"})
            assert (given.returncode, variable in given.stderr, "target: 0.5" in given.stdout) == (0, True, True)
            wrong = run("fitt")
            assert (wrong.returncode, wrong.stdout) == (2, "")
            assert wrong.stderr.startswith("lightning-fed: error: there is no command 'fitt' (did you mean fit?)")
            assert (
                "target: null" in run("fit", "--config", "q.yaml", "--print_config").stdout
            )  # the variable ended with its command
            (tmp_path / "kernel.py").write_text("import sys\nprint('torch' in sys.modules, __name__, sys.argv[1:])")
            assert run("-m", "kernel", "-f", "x", program=program, PYTHONPATH=str(tmp_path)).stdout == "True __main__ ['-f', 'x']\n"
