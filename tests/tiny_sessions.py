"""What processes there are, as Linux tells."""

import time
from pathlib import Path


def family(leader: int) -> list[int]:
    """Living processes of the session that a process leads: itself, its workers, their server."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            if fields[0] != "Z" and int(fields[3]) == leader:
                found.append(int(folder.name))
    return found


def gone_within(leader: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while family(leader):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
