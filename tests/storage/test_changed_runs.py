"""Checkpoints that somebody has changed, and what else lies in the folder of a run."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import CLASSES, Net, data_for, new_data, new_federation, new_method, new_trainer

from lightning_fed.errors import DamagedError, FederationError
from lightning_fed.methods import FedAvg
from lightning_fed.models import Adapters
from lightning_fed.storage.checkpoint import Checkpoint, Checkpoints
from lightning_fed.storage.client_store import ClientStore
from lightning_fed.storage.continuing import differences
from lightning_fed.storage.initial import initial_network
from lightning_fed.storage.manifest import FORMAT, Best, Manifest, Setting
from lightning_fed.storage.run_folder import load_checkpoint, newest_run, versions

IDENTITY = {"method": "FedAvg", "seed": 0, "clients": 4, "data": "0123abcd"}
STATE = {"weight": torch.tensor([1.0, 2.0])}


def save(rounds: int = 2) -> Path:
    """A run of some rounds, in each of which client 0 changed; the newest checkpoint."""
    checkpoints = Checkpoints(Path("run"))
    store = ClientStore(checkpoints.clients_folder, memory_limit=10**6)
    kept = ClientStore(checkpoints.clients_folder, 10**6, "server")
    for round in range(1, rounds + 1):
        store.put(0, {"x": torch.tensor([float(round)])}, round)
        kept.put(3, {"x": torch.tensor([float(round)])}, round)
        rows = [{"round": float(number), "accuracy": 0.5} for number in range(1, round + 1)]
        manifest = Manifest(round, IDENTITY, 1, best=Best(1, 0.5, 0.5), settings={"lr": 0.1})
        path = checkpoints.save(manifest, rows, STATE, store, {0: round}, kept)
    return path


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what a manifest says, and its checksum with it."""
    file = path / "manifest.json"
    body = json.loads(json.loads(file.read_text())["body"])
    change(body)
    text = json.dumps(body)
    file.write_text(json.dumps({"format": FORMAT, "crc32": zlib.crc32(text.encode(), FORMAT), "body": text}))


def forge_index(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """The same of an index file: its name is the hash of what it says."""
    folder = path.parents[1] / "index"
    content = json.loads((folder / load_checkpoint(path)[0].manifest.index[0]).read_text())
    change(content)
    data = json.dumps(content).encode()
    name = f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.json"
    (folder / name).write_bytes(data)
    forge(path, lambda body: body.update(index={"0": name}))


FILE = "client_000000_round_000002.safetensors"


@pytest.mark.parametrize("of", ["manifest", "index"])
@pytest.mark.parametrize("name", ["", "..", "../../mine", "/etc/passwd", "a\0b", "x" * 999])
def test_names_of_other_files_are_refused(of: str, name: str) -> None:
    """What a checkpoint names is deleted when it is too old."""
    path = save()
    if of == "manifest":
        forge(path, lambda body: body.update(index={"0": name}))
    else:
        forge_index(path, lambda clients: clients["0"]["client"].update(file=name))
    with pytest.raises(DamagedError, match=r"cannot be used: .* names .*, which is no"):
        load_checkpoint(path)
    assert load_checkpoint(Path("run"))[0].manifest.round == 1


def test_a_manifest_in_the_folder_of_another_round_is_refused() -> None:
    path = save(3)
    with pytest.raises(DamagedError, match="is of round 3, but is named after round 4: put it where it belongs"):
        load_checkpoint(path.rename(path.with_name("round_000004")))


NONSENSE = [
    b"",
    b"\xff" * 64,
    (2**62).to_bytes(8, "little") + b"{}",
    *(
        len(header).to_bytes(8, "little") + header + bytes(8)
        for header in (
            b"[]",
            b'{"weight": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}',
            b'{"weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        )
    ),
]


@pytest.mark.parametrize("data", NONSENSE, ids=lambda data: repr(data[8:40]))
def test_a_file_that_holds_no_tensors_is_refused(data: bytes) -> None:
    Path("weights.safetensors").write_bytes(data)
    with pytest.raises(FederationError, match=r"init_from: could not read weights\.safetensors") as caught:
        initial_network(Path("weights.safetensors"))
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------- on the disk


FILES = ["round_000002/manifest.json", "round_000002/server.safetensors", f"../clients/{FILE}", "index"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["folder", "dangling", "loop"])
def test_what_is_no_file_is_damage(file: str, kind: str) -> None:
    path = save()
    victim = Path("run/checkpoints", file)
    if file == "index":
        victim = Path("run/index", load_checkpoint(path)[0].manifest.index[0])
    victim.unlink()
    if kind == "folder":
        victim.mkdir()
    else:
        victim.symlink_to(victim.name if kind == "loop" else "nowhere")
    with pytest.raises(DamagedError, match=f"{path} cannot be used: .*{victim.name} is (missing or cannot be read|damaged)"):
        load_checkpoint(path)
    checkpoint, [problem] = load_checkpoint(Path("run"))
    assert (checkpoint.manifest.round, victim.name in problem) == (1, True)


def foreign() -> list[Path]:
    """Things of other people's, in every folder of a run."""
    run = Path("run")
    files = [run / "checkpoints" / name for name in ("notes.txt", "round_000003", "round_x", "round_00000٣", ".DS_Store")]
    files += [run / "clients" / name for name in ("notes.txt", "client_000000.safetensors", "weights.safetensors")]
    folders = [run / "checkpoints" / name for name in ("round_000002.bak", "round_2", "backup", "round_000001 (copy)")]
    folders += [
        run / "clients" / "backup",
        run / "clients" / "client_000001_round_000009.safetensors",
        Path("version_x"),
        run / "old",
    ]
    for folder in folders:
        folder.mkdir()
        (folder / "manifest.json").write_text("mine")
    for file in files:
        file.write_text("mine")
    link = run / "checkpoints/round_000009"
    link.symlink_to("backup", target_is_directory=True)
    return [*files, *(folder / "manifest.json" for folder in folders), link]


def test_what_others_have_put_beside_checkpoints_is_left_alone() -> None:
    save()
    things = foreign()
    checkpoint, problems = load_checkpoint(Path("run"))
    assert checkpoint.manifest.round == 2
    assert problems == [f"run/checkpoints/round_{round:06d} is not a folder, and so not a checkpoint" for round in (9, 3)]
    continued = Checkpoints(Path("run"), checkpoint)
    continued.go_on_from(checkpoint)
    store = ClientStore(continued.clients_folder, 10**6)
    store.restore(checkpoint.clients)
    for round in (3, 4, 5):
        store.put(0, {"x": torch.zeros(1)}, round)
        rows = [{"round": float(number)} for number in range(1, round + 1)]
        continued.save(Manifest(round, IDENTITY, 1), rows, STATE, store, {0: round})
    assert [path.name for path in continued.paths()] == ["round_000004", "round_000005"]
    assert all(os.path.lexists(thing) for thing in things if thing.name != "round_000003")
    assert Path("run/checkpoints/round_000003.other1").read_text() == "mine"  # it was in the way of a checkpoint


def test_a_folder_of_others_is_left_alone_when_a_run_is_continued() -> None:
    new_federation(1, "runs").fit(new_method("FedAMP"), new_data(2))
    notes = Path("runs/version_0/scratch/notes.md")
    notes.parent.mkdir()
    notes.write_text("mine")
    new_federation(2, "runs", store_limit_mb=1e-6).fit(new_method("FedAMP"), new_data(2), "last")
    assert notes.read_text() == "mine"
    assert not Path("runs/version_0/clients/scratch").exists()


def test_files_called_like_runs_are_no_runs() -> None:
    new_federation(1, "runs").fit(new_method("FedAvg"), new_data(2))
    for name in ("version_1", "version_x"):
        Path("runs", name).write_text("notes")
    assert versions(Path("runs")) == [Path("runs/version_0")]
    assert newest_run(Path("runs"), "FedAvg") == Path("runs/version_0")
    new_federation(1, "runs").fit(new_method("FedAvg"), new_data(2))
    assert versions(Path("runs")) == [Path("runs/version_0"), Path("runs/version_2")]


# ---------------------------------------------------------------------------------------------------- half-foreign runs


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds of a method whose clients keep a network and the moments of its optimizer."""
    folder = tmp_path_factory.mktemp("played")
    new_federation(2, folder).fit(new_method("FedPer"), new_data(2))
    return folder / "version_0"


def rewrite(checkpoint: Checkpoint, state: dict[str, torch.Tensor], client: int | None = None) -> None:
    """Put another state into a checkpoint, with its checksum."""
    data = safetensors.torch.save(state)
    facts = {"bytes": len(data), "crc32": zlib.crc32(data)}
    if client is None:
        (checkpoint.path / "server.safetensors").write_bytes(data)
        forge(checkpoint.path, lambda body: body["server"].update(facts))
        return
    forge_index(checkpoint.path, lambda clients: clients[str(client)]["client"].update(facts))
    (checkpoint.run_folder / "clients" / checkpoint.clients[client]["file"]).write_bytes(data)


def copied(played: Path) -> Path:
    """A copy to be changed."""
    import shutil

    shutil.copytree(played, "runs/version_0")
    return Path("runs/version_0")


def go_on(run: Path, rounds: int = 3, data: Any = None, **options: Any) -> None:
    new_federation(rounds, run.parent).fit(new_method("FedPer", **options), data or new_data(2), ckpt_path=run)


@pytest.mark.parametrize("of", [None, 0])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.double(), "of torch.float64, expected torch.float32"),
        (lambda t: t.half(), "of torch.float16, expected torch.float32"),
        (lambda t: t.int(), "of torch.int32, expected torch.float32"),
        (lambda t: t[None], "of shape"),
        (lambda t: None, "lacks"),
    ],
)
def test_states_of_another_kind_are_refused(played: Path, of: int | None, change: Callable[[Any], Any], message: str) -> None:
    run = copied(played)
    checkpoint, _ = load_checkpoint(run)
    file = checkpoint.path / "server.safetensors" if of is None else run / "clients" / checkpoint.clients[of]["file"]
    state = safetensors.torch.load_file(file)
    changed = {name: change(tensor) for name, tensor in state.items()}
    rewrite(checkpoint, {name: tensor for name, tensor in changed.items() if tensor is not None}, of)
    with pytest.raises(FederationError, match=message):
        go_on(run)


@pytest.mark.often(2)
@pytest.mark.parametrize(
    ("method", "name", "message"),
    [("HETLoRA", "ranks", "Client 0 had rank"), ("FedKD", "holds", "Clients held changes")],
)
@pytest.mark.parametrize("value", [-2, 2**40])
def test_what_a_server_counts_has_its_range(method: str, name: str, message: str, value: int) -> None:
    new_federation(1, "runs", participation=0.7).fit(new_method(method), data_for(method, num_clients=2, size=40))
    checkpoint, _ = load_checkpoint(Path("runs/version_0"))
    rewrite(checkpoint, checkpoint.server | {name: torch.full_like(checkpoint.server[name], value)})
    with pytest.raises(FederationError, match=message):
        new_federation(2, "runs").fit(new_method(method), data_for(method, num_clients=2, size=40), "last")


def test_a_history_that_lacks_what_the_method_reports_is_refused(played: Path) -> None:
    run = copied(played)
    newest, _ = load_checkpoint(run)
    forge(newest.path, lambda body: body.update(rows=[{"round": 2.0, "after/test_accuracy/mean": 2.0}]))
    with pytest.raises(FederationError, match="its history lacks 'traffic/total_parameters' in round 2"):
        new_federation(3, run.parent, target=2.0).fit(new_method("FedPer"), new_data(2), ckpt_path=run)


def test_a_field_of_a_newer_version_is_refused(played: Path) -> None:
    run = copied(played)
    newest, _ = load_checkpoint(run)
    forge(newest.path, lambda body: body.update(later=1))
    _, passed_over = load_checkpoint(run)
    assert "has later, which this version does not know: a newer one wrote it" in str(passed_over)


def test_fewer_rounds_than_were_played_are_refused(played: Path) -> None:
    with pytest.raises(FederationError, match=r"round_000002 is of round 2, but rounds is 1: set rounds to at least that"):
        go_on(copied(played), rounds=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": new_data(2, batch_size=7, single_example="drop")}, "batch_size 16, now 7; single_example join, now drop"),
        ({"optimizer": torch.optim.AdamW}, "SGD, now AdamW"),
        ({"epochs": 3, "gradient_clip": 1.0}, "epochs 1, now 3; gradient_clip None, now 1.0"),
    ],
    ids=["batch", "optimizer", "epochs"],
)
def test_a_continued_run_says_what_differs(
    played: Path, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(played)
    go_on(run, **change)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "was made with" in line]
    assert said in line
    assert line.startswith("Checkpoint runs/version_0/checkpoints/round_000002 was made with ")
    go_on(run, rounds=4, **change)
    assert "was made with" not in capsys.readouterr().out


def test_a_continued_run_says_if_other_clients_take_part(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(1, "runs").fit(new_method("FedAvg"), new_data(3))
    new_federation(2, "runs", eligible_clients=[2, 0]).fit(new_method("FedAvg"), new_data(3), "last")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "was made with" in line]
    assert "eligible_clients None, now [0, 2]" in line


@pytest.mark.parametrize("name", ["FedAvg", "FedPer"])
def test_a_continued_run_says_if_new_clients_start_elsewhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With FedAvg they have nothing that does not come from the server."""
    new_federation(1, "first").fit(new_method("FedAvg"), new_data(2))
    new_federation(1, "runs", init_from="first/version_0").fit(new_method(name), new_data(2))
    for rounds, origin in ((2, "first/version_0"), (3, None)):
        new_federation(rounds, "runs", init_from=origin).fit(new_method(name), new_data(2), "last")
        said = re.findall(r"initial weights \w+, now \w+", capsys.readouterr().out)
        assert len(said) == (name == "FedPer" and origin is None)


def test_a_continued_run_says_if_another_trainer_trains(capsys: pytest.CaptureFixture[str]) -> None:
    new_federation(1, "runs").fit(new_method("FedAvg"), new_data(2))
    trainer = partial(new_trainer, precision="bf16-mixed", limit_train_batches=2)
    new_federation(2, "runs", trainer=trainer).fit(new_method("FedAvg"), new_data(2), "last")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "was made with" in line]
    assert "trainer.precision 32-true, now bf16-mixed; trainer.limit_train_batches 1.0, now 2;" in line


ADAPTERS = '{"class_path": "lightning_fed.models.Adapters", "init_args": {"lora_alpha": %s, "r": 4, "target_modules": "all"}}'


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (ADAPTERS % 4, ADAPTERS % 400, ["of.init_args.lora_alpha 4, now 400"]),
        ('{"a": {"b": 1}}', '{"a": {"c": 1}}', ["of.a.b 1, now absent", "of.a.c absent, now 1"]),
        (str([*range(40)]), str([*range(39), 7, 8]), ["of.39 39, now 7", "of.40 absent, now 8"]),
        (str([0] * 39), str([1] * 39), [*(f"of.{place} 0, now 1" for place in range(5)), "34 more of of"]),
        ("[1, 2]", "[2]", ["of [1, 2], now [2]"]),
        ('{"a": "1"}', '{"a": 1}', ["of.a '1', now 1"]),
        (None, "[0, 2]", ["of None, now [0, 2]"]),
        ("{% x %}" * 20, "{% x %}" * 10 + "y" + "{% x %}" * 10, [f"of {'{% x %}' * 20}, now {'{% x %}' * 10}y{'{% x %}' * 10}"]),
        ('{"lr": 1}', '{"lr": 1.0}', []),
    ],
)
def test_of_a_nested_setting_the_entries_that_differ_are_said(before: Setting, after: Setting, said: list[str]) -> None:
    assert differences({"of": before, "lost": 1}, {"of": after, "new": 1}) == said


def test_a_continued_run_says_if_another_network_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    first, other = Net(CLASSES), Net(CLASSES)
    on_top = {"adapters": Adapters(r=2, target_modules="all-linear")}
    new_federation(1, "runs").fit(FedAvg(first, CLASSES, **on_top), new_data(2, size=40))
    new_federation(2, "runs").fit(FedAvg(first, CLASSES, **on_top), new_data(2, size=40), "last")
    assert "was made with" not in capsys.readouterr().out
    new_federation(3, "runs").fit(FedAvg(other, CLASSES, **on_top), new_data(2, size=40), "last")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "was made with" in line]
    assert re.search(r"weights of the frozen network [0-9a-f]{8}, now [0-9a-f]{8}: what is given now applies\.$", line)


def test_frozen_weights_that_lie_apart_in_memory_have_a_checksum() -> None:
    class Apart(Net):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            self.scale = torch.nn.Parameter(torch.ones(1).expand(4), requires_grad=False)

    new_federation(1).fit(FedAvg(Apart, CLASSES), new_data(2, size=40))
