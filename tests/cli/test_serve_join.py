"""The verbs serve and join, with a link in place of Flower."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import yaml
from tiny import final_checkpoint, same
from tiny_commands import refused
from tiny_sites import Clock, Memory

from lightning_fed.__main__ import main
from lightning_fed.cli.join import run
from lightning_fed.cli.serve import parser
from lightning_fed.deployment.flower.commands import answers
from lightning_fed.deployment.site import Site
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.errors import FederationError

STUDY: dict[str, Any] = {
    "seed_everything": 0,
    "data": {"class_path": "Digits", "init_args": {"num_clients": 2, "image_size": 8}},
    "model": {
        "class_path": "FedAvg",
        "init_args": {"backbone": {"class_path": "MLP", "init_args": {"inputs": 192, "hidden": [8]}}},
    },
    "federation": {"rounds": 2, "run_dir": "runs", "evaluate_every": 0, "progress": False, "logger": False},
    "trainer": {"accelerator": "cpu", "limit_train_batches": 2},
}

Joining = Callable[..., Site]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Joining:
    """Starts a site as the command line does, and hands it over before it would answer."""
    monkeypatch.setattr("lightning_fed.deployment.flower.commands.need_flower", lambda: None)
    Path("study.yaml").write_text(yaml.safe_dump(STUDY))
    Path("key").touch()
    Path("ca.crt").touch()
    sites: list[Site] = []
    monkeypatch.setattr("lightning_fed.deployment.flower.node.answer_all", lambda site, *others: sites.append(site))

    def started(client: int, *options: str) -> Site:
        own = ["--server", "localhost:1", "--client", str(client), "--key", "key", "--root_certificates", "ca.crt"]
        main(["join", "--config", "study.yaml", *own, *options])
        return sites[-1]

    return started


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Memory]:
    """Serves through a link to sites in this process."""
    Path("sites").mkdir()
    Path("certificates").mkdir()
    for name in ("ca.crt", "server.pem", "server.key"):
        (Path("certificates") / name).touch()

    def served(sites: list[Site], *options: str) -> Memory:
        link = Memory(dict(enumerate(sites)))

        @contextmanager
        def linked(*settings: Any) -> Iterator[Memory]:
            with quiet_lightning():
                yield link

        monkeypatch.setattr("lightning_fed.deployment.flower.link.linked", linked)
        monkeypatch.setattr("lightning_fed.deployment.engine.time", Clock())
        for client in range(len(sites)):
            (Path("sites") / f"{client}.pub").touch()
        main(["serve", "--config", "study.yaml", "--sites", "sites", "--certificates", "certificates", *options])
        return link

    return served


def test_a_study_is_what_fit_would_play(join: Joining, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve([join(client, "--partitioned") for client in (0, 1)])
    assert "Client 1: 290 training, 36 validation, 36 test examples\n" in capsys.readouterr().out
    main(["fit", "--config", "study.yaml", "--federation.run_dir", "here"])
    ours, theirs = (final_checkpoint(Path(folder) / "version_0") for folder in ("runs", "here"))
    assert same(ours[3], theirs[3])
    assert {name: value for name, value in theirs[2][-1].items() if name in ours[2][-1]} == ours[2][-1]
    assert yaml.safe_load(Path("runs/version_0/config.yaml").read_text())["model"]["class_path"].endswith("FedAvg")
    serve([join(client, "--partitioned") for client in (0, 1)], "--ckpt_path", "last", "--federation.rounds", "3")
    assert final_checkpoint(Path("runs/version_0"))[0] == 3


def test_all_data_of_a_site_are_its_clients(join: Joining) -> None:
    """However many clients the configuration deals them to, and however."""
    site = join(3, "--data.init_args.num_clients", "7")
    assert site.info.id == 3
    assert sum((site.info.num_train, site.info.num_val, site.info.num_test)) == 1797
    assert all(site.info.label_counts)
    assert site.store.folder == Path("site-3/states").absolute()


def test_what_comes_of_it_is_written_for_use_elsewhere(join: Joining, serve: Any) -> None:
    """A site's own model, with its private part, and what the server has: those that fit would have exported."""
    method = ["--model", "FedPer", "--model.init_args.fine_tuning.epochs", "1"]
    sites = [join(client, "--partitioned", "--output", f"model-{client}", *method) for client in (0, 1)]
    serve(sites, "--output", "shared", *method)
    fit = ["--config", "study.yaml", *method, "--federation.run_dir", "here"]
    main(["fit", *fit])
    for client, expected in (("0", "model-0"), ("1", "model-1"), (None, "shared")):
        main(["export", *fit, "--output", "expected", *(["--client", client] if client else [])])
        ours, theirs = (safetensors.torch.load_file(Path(folder) / "model.safetensors") for folder in (expected, "expected"))
        assert same(ours, theirs)
        config, known = (json.loads((Path(folder) / "config.json").read_text()) for folder in (expected, "expected"))
        assert config == known


def test_nothing_but_an_exported_model_makes_way_for_one(join: Joining, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with somebody's files is refused at the start; what somebody puts beside a model stays there."""
    for folder in ("thesis", "model"):
        Path(folder).mkdir()
        (Path(folder) / "chapter_1.md").write_text("years of work")
    Path("file").touch()
    Path("model/model.safetensors").touch()
    Path("model/config.json").write_text('{"lightning_fed_version": "0.1"}')  # of an earlier start
    sites = [join(0, "--partitioned", "--output", "model"), join(1, "--partitioned")]
    for start in (partial(join, 0), partial(serve, sites)):
        for output, message in (
            ("thesis", "thesis has 'chapter_1.md' in it and no exported model"),
            ("file", "file is not a folder"),
        ):
            assert f"{message}: give another output, " in refused(capsys, start=partial(start, "--output", output))
    serve(sites)
    assert json.loads(Path("model/config.json").read_text())["round"] == 2
    assert safetensors.torch.load_file("model/model.safetensors")
    assert {path.name for path in Path("model").iterdir()} == {"config.json", "model.safetensors", "chapter_1.md"}
    assert {Path(folder, "chapter_1.md").read_text() for folder in ("thesis", "model")} == {"years of work"}


def test_a_configuration_that_differs_is_refused_with_its_keys(
    join: Joining, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not one that says elsewhere where the data are, and on what to train."""
    different = (
        "--partitioned",
        "--model.init_args.epochs=2",
        "--data.init_args.batch_size=8",
        "--trainer.limit_predict_batches=3",
    )
    sites = [
        join(0, "--partitioned"),
        join(1, "--partitioned", *different),
    ]
    with pytest.raises(SystemExit) as ended:
        serve(sites)  # which say of themselves that they refuse it
    assert ended.value.code == 2
    told = "The site of client 1 cannot take part: this is another study: data.batch_size is 8 at the site and 64 at the server; "
    told += (
        "model.epochs is 2 at the site and 1 at the server; trainer.limit_predict_batches is 3 at the site and None at the server."
    )
    assert told in capsys.readouterr().err
    other = join(1, "--data.init_args.val_share", "0.2", "--trainer.accelerator", "auto", "--federation.rounds", "9")
    assert other.settings == sites[0].settings


def test_what_a_run_begins_with_is_compared_by_its_weights(join: Joining, serve: Any) -> None:
    """Not by where they lie."""
    serve([join(client, "--partitioned") for client in (0, 1)])
    first, second = Path("runs/version_0/checkpoints/round_000001"), Path("runs/version_0/checkpoints/round_000002")
    begin = [join(0, "--federation.init_from", str(path)) for path in (first, second, second.absolute())]
    one, two, same_two = (site.settings.settings["federation.init_from"] for site in begin)
    assert one != two == same_two


@pytest.mark.often(4)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "FedDF"], "The method needs public data at the server, and there are no data: choose another method"),
        (["--host", "0.0.0.0"], "Got host=0.0.0.0, where anyone who can reach it can start programs on the server"),
        (["--sites", "elsewhere"], "elsewhere has no public keys: expected 0.pub, 1.pub"),
        (["--sites", "gaps"], "gaps has 0.pub, 2.pub: expected 0.pub, 1.pub, … without gaps"),
        (["--certificates", "sites"], "sites lacks ca.crt, server.pem, server.key: docs/deployment.md says how"),
        (["--quorum", "1.5"], "argument --quorum: '1.5' is not a share in (0, 1]"),
        (["--federation.epochs", "1"], "federation.epochs"),
        (["--port", "70000"], "argument --port: '70000' is not a port from 1 to 65535"),
    ],
)
def test_what_cannot_be_is_one_line(
    join: Joining, serve: Any, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("gaps").mkdir()
    for name in ("0.pub", "2.pub"):
        (Path("gaps") / name).touch()
    assert message in refused(capsys, start=partial(serve, [join(0)], *options))
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--key", "none"], "There is no file none"),
        (["--client", "three"], "argument --client: 'three' is not a number from 0 on"),
        (["--without_supernode"], "Got without_supernode without socket"),
        (["--client", "5", "--partitioned"], "There is no client 5: ids go from 0 to 1"),
        (["--data", "Nothing"], "there is no 'Nothing'"),
    ],
)
def test_a_site_that_cannot_be_is_one_line(
    join: Joining, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, start=partial(join, 0, *options))


def test_a_key_of_another_user_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's process reads it, as a user of its own."""

    def forbidden(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("lightning_fed.deployment.flower.commands.need_flower", lambda: None)
    monkeypatch.setattr(Path, "is_file", forbidden)
    args = ["--server=localhost:1", "--client=0", "--key=/of/another/user", "--root_certificates=ca.crt", "--without_supernode"]
    with pytest.raises(FederationError, match="Got without_supernode without socket"):  # which comes after the files
        run(["join", *args])


def test_without_flower_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for verb, own in (
        ("serve", ["--sites", "sites", "--certificates", "certificates"]),
        ("join", ["--server", "localhost:1", "--client", "0", "--key", "key", "--root_certificates", "ca.crt"]),
    ):
        assert "which is not installed: pip install 'lightning-fed[flower]'" in refused(capsys, verb, *own)


def test_a_given_port_can_be_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        given = parser().parse_args(["--sites", "sites", "--certificates", "certificates", "--port", port])
        assert answers("127.0.0.1", given.port)


def test_keys_are_read_as_flower_has_them() -> None:
    """A file per client, each another one."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    from lightning_fed.deployment.flower.link import keys_in_pem
    from lightning_fed.errors import FederationError

    keys = [ec.generate_private_key(ec.SECP384R1()).public_key(), ec.generate_private_key(ec.SECP256R1()).public_key()]
    other = ed25519.Ed25519PrivateKey.generate().public_key()
    files = [Path(name) for name in ("0.pub", "1.pub", "2.pub", "3.pub")]
    for file, key in zip(files, [*keys, keys[0], other], strict=True):
        file.write_bytes(key.public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH))
    pem = [key.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo).decode() for key in keys]
    assert keys_in_pem(files[:2]) == {pem[0]: 0, pem[1]: 1}
    with pytest.raises(FederationError, match=r"2\.pub and 0\.pub are the same key: each site needs its own"):
        keys_in_pem(files[:3])
    with pytest.raises(FederationError, match=r"3\.pub is a kind of key that Flower does not know"):
        keys_in_pem([files[3]])
    files[0].write_text("no key")
    with pytest.raises(FederationError, match=r"0\.pub is not a public key .*ssh-keygen -t ecdsa -b 384"):
        keys_in_pem(files)
