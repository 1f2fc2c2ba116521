"""Error messages for unknown options."""

from collections.abc import Collection

from lightning_fed.cli.help.page import BLOCKS
from lightning_fed.experiments.renames import OPTIONS, hint
from lightning_fed.formatting import nearest

OF_OPTIMIZERS = {"lr", "learning_rate", "momentum", "weight_decay", "betas", "nesterov"}
"""Options of an optimizer, which users look for in other places."""


def unknown(text: str, option: str, options: Collection[str], verb: str = "fit") -> str:
    """A sentence that begins with a text about an unknown option, without dashes, and names the known option that may have been
    meant.
    """
    blocks = sorted(name for name in options if name.rpartition(".")[2] == option)
    near = f" (did you mean --{blocks[0]}?)" if blocks else nearest(option, options, "--")
    return f"{text}{hint(option.rpartition('.')[2], OPTIONS) or place_of(option) or near}; {where_to_look(option, verb=verb)}"


def meant(option: str, names: Collection[str]) -> str:
    """What may have been meant by an unknown option of a class with these options."""
    return hint(option, OPTIONS) or place_of(option, names) or nearest(option.partition(".")[0], names)


def where_to_look(option: str, of: str = "", verb: str = "fit") -> str:
    """The help that lists the options of an option's block, of a class if its name is known, or else of the verb."""
    block = option.partition(".")[0]
    topic = block if block in BLOCKS else ""
    return f"see lightning-fed {verb} " + (f"--{block}.help {of}" if of else f"--help {topic}".rstrip())


def place_of(option: str, names: Collection[str] = ("optimizer",)) -> str:
    """Where an optimizer's option belongs, if this is one."""
    elsewhere = option.rpartition(".")[2] in OF_OPTIMIZERS and not (option.startswith("model.") and ".init_args." in option[6:])
    if not elsewhere or "optimizer" not in names:
        return ""
    name = option.rpartition(".")[2].replace("learning_rate", "lr")
    return f" (it belongs to the optimizer: --model.init_args.optimizer.init_args.{name})"
