"""Plays golden cases with the library that is on the path, and writes down what came of it. ``compare.py`` starts it, once for each
side; what of the library it calls is the command line and public names.
"""

import argparse
import contextlib
import copy
import csv
import gc
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from words import Renames, deep, flat

HERE = Path(__file__).parent
ROUNDS = 3
WAYS = ("here", "measured", "killed", "processes", "plain")
ALL_WAYS = (*WAYS, "printed", "alone")
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
NOISE = re.compile(r"seconds/")
"""Columns that no two runs have in common."""


@cache
def cases() -> dict[str, dict[str, Any]]:
    """All cases by name, each with its base's settings under its own."""
    content = yaml.safe_load((HERE / "cases.yaml").read_text())
    found = {}
    for name, case in content["cases"].items():
        base = content["bases"][case.get("base", "none")]
        merged = {"name": name, "method": name, "play": list(WAYS), "quick": name in content["quick"]} | case
        data = base.get("data", {})
        merged["data"] = {"class_path": data.get("class_path"), "init_args": case.get("data", {})}
        merged["model"] = {"class_path": merged["method"], "init_args": base.get("model", {}) | case.get("model", {})}
        found[name] = merged
    others = {"configurations": {"play": ["printed"], "quick": False}, "module": {"play": ["alone"], "quick": True}}
    return found | {name: {"name": name} | case for name, case in others.items()}


def fingerprint(name: str) -> str:
    """What a case is made of: records of two sides are comparable only if it is the same."""
    parts = (HERE / "golden_parts.py").read_text() + json.dumps(cases()[name], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


class Record:
    """What came of a case: tensors, tables, values and options by name, in the words of the tree that was played.

    Args:
        fingerprint: of the case.
    """

    def __init__(self, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint
        self.tensors: dict[str, Any] = {}
        self.tables: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    def write(self, folder: Path, name: str) -> None:
        """Two files, the second of which says that the first is whole."""
        from safetensors.torch import save_file

        plain = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in self.tensors.items()}
        save_file(plain, folder / f"{name}.safetensors")
        content = {key: value for key, value in vars(self).items() if key != "tensors"}
        aside = folder / f".{name}.json"
        aside.write_text(json.dumps(content, indent=1))
        aside.rename(folder / f"{name}.json")

    def table(self, name: str, path: Path) -> None:
        """The rows of a CSV file, as they are written, without what is noise."""
        header, *rows = csv.reader(io.StringIO(path.read_text(), newline=""))
        columns = [column for column in header if not NOISE.match(column)]
        kept = [[value for column, value in zip(header, row, strict=True) if column in columns] for row in rows]
        self.tables[name] = {"columns": columns, "rows": kept}

    def files(self, name: str, folder: Path) -> None:
        """Tensors and JSON of a folder, by the names of the files without the rounds in them."""
        from safetensors.torch import load_file

        for path in sorted(folder.rglob("*")):
            known = re.sub(r"/?_?round_\d+(_\d+)?", "", str(path.relative_to(folder).with_suffix("")))
            if path.suffix == ".safetensors":
                self.tensors |= {f"{name}/{known}/{key}": tensor for key, tensor in load_file(path).items()}

    def json(self, name: str, path: Path) -> None:
        self.values |= {f"{name}/{key}": value for key, value in flat(json.loads(path.read_text()), separator="/").items()}


class Player:
    """Plays a case in its ways.

    Args:
        root: the tree that is played.
        renames: its words.
        case: what is played.
    """

    def __init__(self, root: Path, renames: Renames, case: dict[str, Any]) -> None:
        self.root, self.renames, self.case = root, renames, case
        self.record = Record(fingerprint(case["name"]))

    def play(self, ways: list[str]) -> Record:
        for way in ways:
            begun = time.monotonic()
            try:
                getattr(self, way)()
            except Exception as error:
                traceback.print_exc()
                self.record.failures[way] = f"{type(error).__name__}: {error}"[:2000]
            self.record.seconds[way] = round(time.monotonic() - begun, 2)
            gc.collect()  # lets go of an engine, and with it of its processes
        return self.record

    # ----------------------------------------------------------------------------------------------------------- configurations

    def config(self, run_dir: str, callbacks: list[Any], processes: bool = False) -> str:
        """The case's configuration in the words of the tree, written to a file; its name."""
        case = self.case
        federation = {"rounds": ROUNDS, "participation": 0.7, "evaluate_every": 1} | case.get("federation", {})
        federation |= {"run_dir": run_dir, "keep": "last", "logger": False, "progress": False, "callbacks": callbacks}
        if processes:
            federation["engine"] = {"class_path": "Processes", "init_args": {"workers": 2}}
        blocks = {"federation": federation, "trainer": {"accelerator": "cpu"} | case.get("trainer", {})}
        if "config" not in case:
            blocks |= {"seed_everything": 7, "data": case["data"], "model": case["model"]}
        words = self.renames
        leaves = {
            words.today(option, "options"): words.value_today(option, value)
            for option, value in flat(blocks).items()
            if value != {}
        }
        path = Path(f"{run_dir}.yaml")
        path.write_text(yaml.safe_dump(deep(leaves), sort_keys=False))
        return str(path)

    def command(self, verb: str, config: str, *more: str) -> str:
        """Do what a command line says, in this process; returns what it prints. Raises :class:`RefusedError` where it refuses."""
        from lightning_fed.__main__ import main

        given = [str(self.root / "configs" / self.case["config"])] if "config" in self.case else []
        args = [verb, *(part for path in (*given, config) if path for part in ("--config", path)), *more]
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                main(args)
        except SystemExit as end:
            if end.code not in (None, 0, 2):  # interrupted, or terminated
                raise
            if end.code:
                raise RefusedError(f"{verb} exited with {end.code}") from None
        return out.getvalue()

    # ------------------------------------------------------------------------------------------------------------------- ways

    def here(self) -> None:
        """A run in this process."""
        from golden_parts import Watch

        self.command("fit", self.config("here", ["golden_parts.Watch"]))
        self.record.tensors |= {f"here/{name}": tensor for name, tensor in Watch.newest.server.items()}
        self.finished("here")

    def measured(self) -> None:
        """What validate and test find of that run, and its exports."""
        from golden_parts import Watch

        for verb in ("validate", "test"):
            self.command(verb, "here.yaml")
            self.record.values |= {f"here/{verb}/{name}": value for name, value in Watch.newest.measured.items()}
        exports = {"client": ["--client", "1"], "server": []}
        if self.case.get("base") in ("texts", "vit"):  # elsewhere there is nothing to merge
            exports["merged"] = ["--client", "1", "--merged", "true"]
        for name, more in exports.items():
            try:
                self.command("export", "here.yaml", "--output", f"exports/{name}", *more)
            except RefusedError:  # of a server that has no model, say
                self.record.values[f"here/export/{name}"] = "refused"
                continue
            self.record.files(f"here/export/{name}", Path("exports", name))
            self.record.json(f"here/export/{name}/config.json", Path("exports", name, "config.json"))

    def killed(self) -> None:
        """A run that is killed in its second round, and continued."""
        config = self.config("killed", ["golden_parts.Kill"])
        child = os.fork()
        if child == 0:
            try:
                self.command("fit", config)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        self.killed_and_continued(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "killed", processes=False)
        if self.case.get("slow_kill"):
            config = self.config("killed_processes", ["golden_parts.Kill"], processes=True)
            # A fork cannot have worker processes: it does not know the server that this one gets them from.
            done = subprocess.run([sys.executable, "-m", "lightning_fed", "fit", "--config", config], check=False)
            self.killed_and_continued(done.returncode, "killed_processes", processes=True)

    def killed_and_continued(self, code: int, run_dir: str, processes: bool) -> None:
        if code != -signal.SIGKILL:
            raise AssertionError(f"The run was to be killed in its second round, but ended with {code}.")
        self.command("fit", self.config(run_dir, [], processes), "--ckpt_path", "last")
        self.finished(run_dir)

    def processes(self) -> None:
        """A run with two worker processes."""
        self.command("fit", self.config("processes", [], processes=True))
        self.finished("processes")

    def finished(self, run_dir: str) -> None:
        """Note all that a finished run has left."""
        [folder] = Path(run_dir).iterdir()
        self.record.files(run_dir, folder)
        for name in ("metrics.csv", "clients.csv", "ranks.csv"):
            if (folder / name).exists():
                self.record.table(f"{run_dir}/{name}", folder / name)
        self.record.json(f"{run_dir}/run.json", folder / "run.json")

    def plain(self) -> None:
        """A client's module in a Trainer of one's own: as it ends, and as it ends when it was stopped and continued."""
        from golden_parts import Prepare, Prepared

        with contextlib.suppress(Prepared):
            self.command("fit", self.config("plain", ["golden_parts.Prepare"]))
        template, data = Prepare.newest.module, Prepare.newest.data
        stop = KeepOne(4)
        for name, callbacks, checkpoint in (("whole", [stop], None), ("continued", [], stop.path)):
            self.trained(f"plain/{name}", copy.deepcopy(template), data, callbacks, checkpoint)

    def trained(self, name: str, module: Any, data: Any, callbacks: list[Any], checkpoint: Path | None) -> None:
        import lightning as L
        import torch

        torch.manual_seed(1 if checkpoint is None else 2)  # the continued one has the random state of the checkpoint
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 3, "enable_checkpointing": False} | SILENT
        trainer = L.Trainer(**options | self.case.get("trainer", {}), callbacks=callbacks)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        self.record.tensors |= {f"{name}/{key}": tensor for key, tensor in module.state_dict().items()}
        logged = {f"logged/{key}": value.item() for key, value in trainer.callback_metrics.items()}
        if checkpoint is not None:  # of phases that were over before it nothing is logged again
            logged = {key: value for key, value in logged.items() if key.startswith("logged/val/")}
        measured = {
            f"test/{key}": value for row in trainer.test(module, datamodule=data, verbose=False) for key, value in row.items()
        }
        self.record.values |= {f"{name}/{key}": value for key, value in (logged | measured).items()}

    def printed(self) -> None:
        """Every configuration as the command line completes it."""
        for path in sorted((self.root / "configs").rglob("*.yaml")):
            if not path.name.endswith(".sweep.yaml"):
                name = str(path.relative_to(self.root / "configs"))
                text = self.command("fit", str(path), "--print_config")
                self.record.options[name] = flat(yaml.safe_load(text))

    def alone(self) -> None:
        """A module that is made in Python and has never seen a federation."""
        from functools import partial

        import torch
        from golden_parts import Images, Net

        from lightning_fed.methods import FedAvg, PFedLoRA

        for method in (FedAvg, PFedLoRA):
            torch.manual_seed(0)
            module = method(backbone=Net, num_classes=4, optimizer=partial(torch.optim.SGD, lr=0.1))
            self.trained(f"alone/{method.__name__}", module, Images(3).client(2), [], None)


class RefusedError(Exception):
    """The command line refused something: it exited with code 2."""


class KeepOne:
    """Makes a checkpoint after so many batches. A callback of Lightning's, which is imported when it is made."""

    path = Path("stopped.ckpt")

    def __new__(cls, batches: int) -> Any:
        from lightning.pytorch.callbacks import Callback

        class Keep(Callback):
            path, left = cls.path, batches

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                self.left -= 1
                if self.left == 0:
                    trainer.save_checkpoint(self.path)

        return Keep()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="the tree that is played")
    parser.add_argument("folder", type=Path, help="where records go")
    parser.add_argument("names", nargs="+", help="cases")
    parser.add_argument("--ways", nargs="+", default=list(ALL_WAYS))
    given = parser.parse_args()

    import torch

    import lightning_fed

    assert Path(lightning_fed.__file__).resolve().is_relative_to(given.root.resolve()), f"{lightning_fed.__file__} is played"
    torch.set_num_threads(1)
    renames, known = Renames.read(given.root / "tests/golden/renames.yaml"), cases()
    folder = given.folder.resolve()
    with tempfile.TemporaryDirectory(prefix="golden_", ignore_cleanup_errors=True) as work:
        tempfile.tempdir = work  # who is killed does not tidy up
        for name in given.names:
            print(f"=== {name}", flush=True)
            Path(work, name).mkdir()
            os.chdir(Path(work, name))
            record = Player(given.root, renames, known[name]).play([way for way in known[name]["play"] if way in given.ways])
            record.write(folder, name)
            print(f"{name}: {record.failures or 'played'} {record.seconds}", flush=True)
        os.chdir(folder)


if __name__ == "__main__":
    main()
