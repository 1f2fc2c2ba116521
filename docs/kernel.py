"""What is there before a notebook's first cell when the site is built: the configurations of this checkout, and programs whose
output stays in one piece and has no colours. conf.py makes it a start-up file of the kernel.
"""

import os
import subprocess
from pathlib import Path


def bash(line: str, cell: str) -> None:
    """``%%bash`` as ever, but what it prints comes all at once: the build would put line ends between the pieces."""
    done = subprocess.run(["bash", "-c", cell], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout, end="")
    done.check_returncode()


os.environ["FORCE_COLOR"] = ""  # kernels set it to 1
Path("configs").symlink_to(Path(os.environ["LIGHTNING_FED_CHECKOUT"]) / "configs")
get_ipython().register_magic_function(bash, "cell")  # noqa: F821
