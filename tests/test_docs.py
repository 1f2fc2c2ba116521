"""What the documentation says of the code. The program of docs/phases.md is run in test_phases.py."""

import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from generators import hooks
from tiny import CLASSES, TINY_BERT, Net, NoisyNet, Recording, momentum, new_federation, new_texts, same, sgd
from tiny_rounds import fit
from tiny_texts import save_tokenizer

import lightning_fed.core
from lightning_fed.cli.dry_run import check_start, read
from lightning_fed.core import (
    ClientInfo,
    FederatedModule,
    FederationError,
    PersonalServer,
    PublicDistillation,
    Server,
    WeightedMean,
)
from lightning_fed.data import CSVFiles, Digits
from lightning_fed.experiments import configs
from lightning_fed.methods import FedAvg, FedHM, FedPer, HOMLoRA, PFedLoRA
from lightning_fed.models import CNN5, Backbone, LinearModel, ResNet8, TransformerClassifier
from lightning_fed.testing.checks import CHECKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
assert {"README.md", "decisions.md", "fedavg.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:bench|configs|docs|examples|lightning_fed|tests)/[\w./]+)`", text)
    linked = re.findall(r"(?:\]\(|src=\")((?!https?:)[^)#\"]+)", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert [path for path in linked if not (page.parent / path).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def test_headings_that_are_linked_to_are_there() -> None:
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(((?!https?:)[^)#\s]*)#([^)\s]+)\)", page.read_text()):
            target = page.parent / path if path else page
            assert anchor in headings(target), f"{page.name}: {path}#{anchor}"


def commands_of(page: Path) -> list[list[str]]:
    """What a page has of ``fit`` with a configuration that is there, without what it begins with: runs that are not."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if "lightning-fed fit --config" in line and not re.search(r"…|\$|FOLDER|my\.yaml|my_lab", line):
                words = shlex.split(line[line.index("lightning-fed") :], comments=True)[1:]
                if begins := words.index("--federation.init_from") if "--federation.init_from" in words else 0:
                    del words[begins : begins + 2]
                found.append(words)
    return found


COMMANDS = {page: commands for page in PAGES if (commands := commands_of(page))}
assert sum(map(len, COMMANDS.values())) > 80


def with_a_new_option() -> dict[Path, list[list[str]]]:
    """Of each page those that have an option which none before them has."""
    known, found = set[str](), dict[Path, list[list[str]]]()
    for page, commands in COMMANDS.items():
        for words in commands:
            options = {word.partition("=")[0] for word in words[3:] if word.startswith("--")}
            if not options <= known:
                found.setdefault(page, []).append(words)
            known |= options
    return found


NEW = with_a_new_option()
pages = partial(pytest.mark.parametrize, "page", ids=lambda page: str(page.relative_to(ROOT)))


def test_every_page_of_the_site_is_in_a_list() -> None:
    lists = DOCS.glob("**/index.md")
    named = {str((page.parent / line.strip()).relative_to(DOCS)) for page in lists for line in page.read_text().splitlines()}
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.glob("**/*.md") if "_build" not in page.parts}
    assert {page for page in pages - named if not page.startswith("methods/")} == {"index"}


def test_configurations_of_commands_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert all(configs.found(words[2]) for commands in COMMANDS.values() for words in commands)


@pages(NEW)
def test_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are known. Configurations without any are parsed in test_every_config.py."""
    monkeypatch.chdir(ROOT)
    for words in NEW[page]:
        read(page.name, words)


@pytest.mark.slow
@pages(COMMANDS)
def test_commands_can_be_played(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are known; and where no files of data are needed, networks, data and Trainer can be built."""
    monkeypatch.chdir(ROOT)
    for words in COMMANDS[page]:
        (check_start if any("digits" in word or "quickstart" in word for word in words) else read)(page.name, words)


def test_the_programs_of_the_page_on_networks_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "networks.md"
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(code, str(page), "exec"), {"__name__": "networks"})
    assert float(capsys.readouterr().out) > 0


def test_the_method_of_the_readme_keeps_the_head() -> None:
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "my_lab.py", "exec"), found)
    own, fedper = (
        fit(method(NoisyNet, CLASSES, optimizer=momentum), rounds=3).run.server.state for method in (found["OwnHeads"], FedPer)
    )
    assert same(own, fedper)


@pytest.fixture
def fedavgm(monkeypatch: pytest.MonkeyPatch) -> type[FederatedModule]:
    """The method of CONTRIBUTING.md, from a file outside the package."""
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    module = ModuleType("my_lab")
    monkeypatch.setitem(sys.modules, "my_lab", module)
    exec(compile(code, "my_lab.py", "exec"), vars(module))
    return module.FedAvgM


def test_the_lines_that_load_exports_do() -> None:
    """All of docs/export.md, one after the other, with the exports that it names."""
    data, method = Digits(num_clients=4), partial(PFedLoRA, CNN5, epochs=0)
    federation = new_federation(1, "images")
    federation.fit(method(), data)
    client = federation.client_module(3).eval()
    federation.export(method(), data, "client-3", client=3)
    federation.export(method(), data, "server")
    federation.export(method(), data, "onnx-3", client=3, format="onnx")
    Path("clinics").mkdir()
    for clinic in ("north", "south"):
        lines = (f"{40 + k},{'?' if k == 4 else k % 3},{'' if k % 7 == 0 else 100 + 2 * k},{'ny'[k % 2]}" for k in range(20))
        Path(f"clinics/{clinic}.csv").write_text("\n".join(["age,pain,pressure,sick", *lines]))
    Path("new.csv").write_text(Path("clinics/north.csv").read_text())
    options = {"client": "file", "categorical": ["pain"], "standardize": "client", "impute": "median"}
    clinics = CSVFiles("clinics", "sick", task="binary", **options)
    federation = new_federation(1, "clinics")
    federation.fit(FedAvg(partial(LinearModel, inputs=5)), clinics)
    federation.export(FedAvg(partial(LinearModel, inputs=5)), clinics, "hospital-0", client=0)
    likely = federation.client_module(0)(clinics.client(0).data[torch.arange(20)][0]).sigmoid()
    fedhm, data = partial(FedHM, partial(ResNet8, width=0.1), ratios=[0.5], epochs=0), Digits(num_clients=4, image_size=8)
    federation = new_federation(1, "low_rank")
    federation.fit(fedhm(), data)
    federation.export(fedhm(), data, "low-rank", client=0)
    transformers.BertForMaskedLM(transformers.BertConfig(**TINY_BERT)).save_pretrained("bert")
    texts = new_texts(2, 60)
    texts.tokenizer = save_tokenizer(Path("tokenizer"))
    lora = HOMLoRA(partial(TransformerClassifier, name="bert"), CLASSES, steps=1)
    federation = new_federation(1, "texts")
    federation.fit(lora, texts)
    federation.export(lora, texts, "adapter")
    federation.export(lora, texts, "merged", merged=True)
    found: dict[str, Any] = {}
    networks = []
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/export.md").read_text(), re.DOTALL):
        exec(compile(code, "export.md", "exec"), found)
        networks.append(found["network"])
    assert same(dict(networks[0].state_dict()), dict(client.backbone.state_dict()))
    expected = client(found["prepare"](found["images"]))
    assert torch.equal(found["labels"], expected.argmax(dim=1))
    torch.testing.assert_close(torch.from_numpy(found["logits"]), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["likely"], likely)
    [answer] = found["answers"]
    inputs = transformers.AutoTokenizer.from_pretrained("tokenizer")(["a text"], return_tensors="pt")
    assert answer["label"] == f"LABEL_{networks[-1](**inputs).logits.argmax().item()}"


def test_the_method_of_the_guide_is_what_it_says(fedavgm: type[FederatedModule]) -> None:
    """The first round is FedAvg's; in the second the server goes on by beta times what it went in the first, with parameters."""
    plain = fit(FedAvg(NoisyNet, CLASSES, momentum), rounds=3).run.server.state
    assert same(fit(fedavgm(NoisyNet, CLASSES, 0.0, optimizer=momentum), rounds=3).run.server.state, plain)
    engine = Recording()
    federation = fit(fedavgm(NoisyNet, CLASSES, 0.5, optimizer=momentum), rounds=2, engine=engine)
    assert not same(federation.run.server.state, plain)
    parameters = {name for name, _ in federation.run.model.named_parameters()}
    (start, second), mean = (engine.fits(r)[0][0].broadcast.state for r in (1, 2)), WeightedMean()
    for _, update in engine.fits(2):
        mean.add(update.state, update.num_examples)
    for name, merged in mean.result().items():
        on = 0.5 * (second[name] - start[name]) if name in parameters else 0
        expected = merged + on
        torch.testing.assert_close(federation.run.server.state[name], expected)


def test_the_method_of_the_guide_passes_the_tests_of_the_guide(fedavgm: type[FederatedModule]) -> None:
    """Which collect as the guide says, one for each check."""
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(compile(code, "test_my_lab.py", "exec"), namespace)
    [mark] = namespace["test_fedavgm"].pytestmark
    names, checks = mark.args
    assert (names, len(checks)) == ("check", len(CHECKS))
    for check in checks:
        namespace["test_fedavgm"](check)


@pytest.fixture
def my_server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file of docs/server.md."""
    module = ModuleType("my_lab")
    monkeypatch.setitem(sys.modules, "my_lab", module)
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "server.md").read_text(), re.DOTALL))
    exec(compile(code, "my_lab.py", "exec"), vars(module))
    return module


def test_the_robust_rule_of_the_page_leaves_out_the_extremes(my_server: ModuleType) -> None:
    updates = [({"w": torch.tensor([value, -value]), "n": torch.tensor(3)}, 1.0) for value in (1.0, 2.0, 3.0, 6.0, 1e9)]
    merged = my_server.trimmed_mean(iter(updates), updates[0][0])
    assert same(merged, {"w": torch.tensor([11 / 3, -11 / 3]), "n": torch.tensor(3)})
    assert my_server.trimmed_mean(iter([]), updates[0][0]) == {}
    with pytest.raises(FederationError, match="got 2 updates, expected more than 2"):
        my_server.trimmed_mean(iter(updates[:2]), updates[0][0])


def test_the_privacy_of_the_page_clips_and_hides(my_server: ModuleType) -> None:
    mechanism = my_server.GaussianMechanism(["w"], clip_norm=1.0, noise_multiplier=2.0)
    state = {"w": torch.full((2,), 5.0), "n": torch.tensor(1)}
    far, near = ({"w": state["w"] + torch.tensor(change), "n": torch.tensor(9)} for change in ([3.0, 4.0], [0.3, 0.4]))
    torch.testing.assert_close(mechanism.clip(far, state), {"w": torch.tensor([5.6, 5.8]), "n": torch.tensor(9)})
    torch.testing.assert_close(mechanism.clip(near, state), near)
    torch.manual_seed(0)
    wide = {"w": torch.zeros(40_000), "n": torch.tensor(1)}
    noisy = mechanism.add_noise(wide, wide, clients=4)
    assert noisy["w"].std().item() == pytest.approx(2.0 * 1.0 / 4, rel=0.02)
    assert noisy["n"] == 1


def test_momentum_on_the_server_is_the_method_of_the_guide(my_server: ModuleType, fedavgm: type[FederatedModule]) -> None:
    """An optimizer of PyTorch, and FedAvgM's two lines."""

    class ByTorch(FedAvg):
        def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
            server = super().configure_server(clients)
            parameters = {name: server.state[name] for name, _ in self.named_parameters()}
            server.update = my_server.OptimizerStep(parameters, partial(torch.optim.SGD, lr=1.0, momentum=0.9))
            return server

    expected = fit(fedavgm(NoisyNet, CLASSES, 0.9, optimizer=momentum), rounds=3).run.server.state
    torch.testing.assert_close(fit(ByTorch(NoisyNet, CLASSES, momentum), rounds=3).run.server.state, expected)


def test_a_run_with_all_parts_goes_on_as_if_it_had_not_been_stopped(my_server: ModuleType) -> None:
    """What the optimizer keeps is in the checkpoint."""
    method = partial(my_server.PrivateFedAvgM, Net, CLASSES, sgd)
    whole = fit(method(), rounds=4)
    fit(method(), rounds=2, run_dir="runs")
    stopped = fit(method(), rounds=4, run_dir="runs")
    assert same(whole.run.server.state_dict(), stopped.run.server.state_dict())
    assert any(name.endswith("/momentum_buffer") for name in whole.run.server.state_dict())
    assert not same(whole.run.server.state, fit(FedAvg(Net, CLASSES, sgd), rounds=4).run.server.state)


def test_hooks_that_the_guide_names_are_there() -> None:
    """In the table: what is to be overridden, or called, by its name; below it what they are, by their docstrings."""
    named = set(hooks.named())
    homes = (FederatedModule, Backbone, Server, PersonalServer, PublicDistillation, lightning_fed.core)
    missing = {name for name in named if not any(hasattr(home, name) for home in homes)}
    assert missing <= {"combine", "privacy", "update"}, missing
    assert len(named) > 25
    [told] = [row for row in hooks.rows() if row.startswith("| `client_loss`")]
    assert told == "| `client_loss` | `FederatedModule` | The loss of a batch: `criterion` of outputs and targets. |"
    assert len(list(hooks.rows())) > 25
