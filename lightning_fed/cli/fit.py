"""Config to objects: one LightningCLI subclass."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_fed.data
import lightning_fed.methods
import lightning_fed.models  # noqa: F401 - imported so that short class names work
from lightning_fed.callbacks import FederationCallback
from lightning_fed.cli.checks import check_config
from lightning_fed.cli.parser import MODE, Parser, refuse_broken_files
from lightning_fed.cli.refusals import shorten
from lightning_fed.cli.trainer import build_trainer, settings_of
from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederationError
from lightning_fed.federation import Federation
from lightning_fed.module import FederatedModule
from lightning_fed.quiet import quiet_lightning
from lightning_fed.run import Run

VERBS = ["fit", "validate", "test", "export"]


class ClientTrainer(L.Trainer):
    """Where LightningCLI looks up options: those of a Trainer, and of the verbs of a federation."""

    fit = Federation.fit  # type: ignore[assignment]
    validate = Federation.validate  # type: ignore[assignment]
    test = Federation.test  # type: ignore[assignment]
    export = Federation.export


class FederationCLI(LightningCLI):
    """The verbs of a federation, configured by ``data``, ``model``, ``federation`` and ``trainer``."""

    def __init__(self, args: Sequence[str]) -> None:
        refuse_broken_files(args)
        self.verbs = [verb for verb in VERBS if args and args[0] == verb] or VERBS
        super().__init__(
            FederatedModule,
            FederatedDataModule,
            trainer_class=ClientTrainer,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            save_config_callback=None,
            trainer_defaults={"devices": 1},  # on several, Lightning would start a distributed run for every turn
            auto_configure_optimizers=False,
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False, "prog": "lightning-fed", "parser_mode": MODE},
            args=list(args),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """What jsonargparse makes (an optimizer to be built, say) refers to the command line that it came from, and so to all its
        objects. Where it travels to, there is no command line.
        """
        return type(None), ()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The verb that is asked for, or all, and which of their arguments are no options. Each has a parser with all the options
        of Trainer and federation, which takes a while to build.
        """
        return {verb: {"model", "datamodule"} for verb in self.verbs}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The federation's block, and what one block knows of another."""
        parser.add_class_arguments(Federation, "federation", skip={"trainer"})
        parser.link_arguments("seed_everything", "federation.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.link_arguments("data.problem", "model.init_args.task", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Checkpoints are the federation's own; Lightning would read hyperparameters from them, over the command line's. What comes
        next is that seeds are set and objects are built: the configuration is checked before.
        """
        check_config(self.config[self.config["subcommand"]])

    def instantiate_classes(self) -> None:
        """Build the objects. What a constructor refuses comes wrapped in a list of the types that the option could have had."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            if isinstance(error, FederationError) or "any of the Union subtypes" not in str(error):
                raise
            raise FederationError(shorten(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> Federation:  # type: ignore[override]
        """The federation takes the Trainer's place and builds a Trainer per turn from the ``trainer`` block."""
        settings = settings_of(dict(self._get(self.config_init, "trainer").items()))
        federation: Federation = self._get(self.config_init, "federation")
        federation.new_trainer = partial(build_trainer, settings)
        federation.callbacks.append(SaveConfig(self))
        return federation


class SaveConfig(FederationCallback):
    """Keeps the configuration that gave a run, defaults included, in its folder."""

    def __init__(self, cli: FederationCLI) -> None:
        self._parser, self._config = cli._parser(cli.subcommand), cli.config[cli.subcommand]

    def on_fit_start(self, run: Run) -> None:
        """Write ``config.yaml``; a continued run replaces it, since it may have more rounds."""
        if run.folder is not None:
            path = run.folder / "config.yaml"
            self._parser.save(self._config, path, skip_unset=False, multifile=False, overwrite=True)


def run(args: Sequence[str]) -> None:
    """Parse the command line and do what it says."""
    with quiet_lightning(), warnings.catch_warnings():
        # Lightning warns when arguments are passed while sys.argv has some too; main() passes on exactly those.
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")
        FederationCLI(args)
