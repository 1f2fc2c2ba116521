"""What a start came to, and whether that is how it should be."""

import contextlib
import io
import re
import shutil
import traceback
import warnings
from pathlib import Path

from hostile.corpus import Start

from lightning_fed.__main__ import main

LONGEST = 700
"""Characters of a refusal: room for the names of all methods."""

NOTES = re.compile(r"(The tokenizer \S+ has no padding token|The trained text of ).*\n")
"""What data say of themselves before anything is refused."""

NOT_KEPT = ("run_dir", "checkpoint", "keep")
"""Options by which a run may leave nothing."""


def fault(start: Start) -> str:
    """What is wrong with how a command ends: it plays its round, or says in one line what is wrong and leaves nothing. Empty if
    nothing is.
    """
    out, err = io.StringIO(), io.StringIO()
    shutil.rmtree("runs", ignore_errors=True)
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("default")  # as Python has it
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        try:
            main(["fit", "--config", start.config, *start.args])
        except SystemExit as end:
            code = end.code
        except Exception as error:
            return f"{start}: a traceback: {traceback.format_exception(error)[-1].strip()[:300]}"
    if code == 0:
        played = any(Path("runs").glob("*/checkpoints/*/manifest.json")) or any(option in str(start) for option in NOT_KEPT)
        return "" if played else f"{start}: no round"
    said, before = err.getvalue(), NOTES.sub("", out.getvalue())
    found = {
        f"exit code {code}": code != 2,
        "not one line": not said.startswith("lightning-fed: error: ") or said.count("\n") > 1 or before != "",
        f"{len(said)} characters": len(said) > LONGEST,
        "leaves a folder": any(Path("runs").glob("*")),
        "does not name the key": not any(re.search(rf"(?<![A-Za-z]){re.escape(name)}(?![A-Za-z])", said) for name in start.names),
    }
    wrong = "; ".join(what for what, is_so in found.items() if is_so)
    return f"{start}: {wrong}: {said[:500]}" if wrong else ""
