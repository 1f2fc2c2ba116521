"""Config to objects: one LightningCLI subclass."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import yaml
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]  # public by its documentation
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_fed.data
import lightning_fed.methods
import lightning_fed.models  # noqa: F401 - imported so that short class names work
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.cli import OF_FEDERATION
from lightning_fed.cli.checks import check_config
from lightning_fed.cli.environment import PREFIX, check_variables
from lightning_fed.cli.parser import MODE, Parser, refuse_broken_files
from lightning_fed.cli.refusals import shorten
from lightning_fed.cli.trainer import REFUSED, build_trainer, settings_of
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import found
from lightning_fed.federation.federation import Federation


class ClientTrainer(L.Trainer):
    """Where LightningCLI looks up options: those of a Trainer, and of the verbs of a federation."""


for verb in OF_FEDERATION:
    setattr(ClientTrainer, verb, getattr(Federation, verb))


class ConfigFile(ActionConfigFile):
    """A configuration: a file, one that comes with the package, by name, or YAML itself."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Take it in."""
        is_yaml = any(sign in values for sign in "{:\n")
        super().__call__(parser, cfg, values if is_yaml else str(found(values)), option_string)


class FederationCLI(LightningCLI):
    """The verbs of a federation, configured by ``data``, ``model``, ``federation`` and ``trainer``.

    Args:
        args: the verb and its options.
        do: what is done with the objects, given this; None: what the verb says.
    """

    config_dump: dict[str, Any]
    """What modules are told they are made with. Lightning would check all of it once more, which takes longer than to build it."""

    def __init__(self, args: Sequence[str], do: Callable[["FederationCLI"], None] | None = None) -> None:
        refuse_broken_files(args)
        self.verbs = [verb for verb in OF_FEDERATION if args and args[0] == verb] or list(OF_FEDERATION)
        self._do = do
        with quiet_lightning():
            # Lightning warns when arguments are passed while sys.argv has some too; main() passes on exactly those.
            warnings.filterwarnings("ignore", "LightningCLI's args parameter")
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
                parser_kwargs={
                    "allow_abbrev": False,
                    "prog": "lightning-fed",
                    "parser_mode": MODE,
                    "default_env": True,
                    "env_prefix": PREFIX,
                },
                args=list(args),
            )

    @property
    def federation(self) -> Federation:
        """The federation, which takes the Trainer's place."""
        federation: Any = self.trainer
        return federation

    def _run_subcommand(self, subcommand: str) -> None:
        if self._do is None:
            super()._run_subcommand(subcommand)
        else:
            self._do(self)

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

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """The parser of a verb, or of all."""
        parser = Parser(**kwargs)
        parser.refused |= {f"trainer.{name}" for name in (*REFUSED, *QUIET)}
        text = "A configuration: a YAML file, or a name that lightning-fed configs lists. Later ones go over earlier ones."
        parser.add_argument("-c", "--config", action=ConfigFile, help=text)
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The blocks, in the order in which one thinks of them: it is that of ``config.yaml``, too."""
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True)
        parser.add_lightning_class_args(FederatedModule, "model", subclass_mode=True)
        parser.add_class_arguments(Federation, "federation", skip={"trainer"})
        parser.add_lightning_class_args(ClientTrainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """What one block knows of another."""
        parser.link_arguments("seed_everything", "federation.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.link_arguments("data.problem", "model.init_args.task", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, after a look at the environment."""
        for verb in self.verbs if len(self.verbs) == 1 else ():
            check_variables(verb, self._subcommand_parsers[verb])
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Checkpoints are the federation's own; Lightning would read hyperparameters from them, over the command line's. What comes
        next is that seeds are set and objects are built: the configuration is checked before.
        """
        check_config(self.config[self.config["subcommand"]])

    def dumped(self, **options: bool) -> dict[str, Any]:
        """The whole configuration of the verb, defaults included, in names and numbers. It was checked when it was parsed.

        Args:
            **options: more of jsonargparse's ``dump``.
        """
        text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_unset=False, skip_validation=True, **options)
        configuration: dict[str, Any] = yaml.safe_load(text)
        return configuration

    def instantiate_classes(self) -> None:
        """Build the objects. What a constructor refuses comes wrapped in a list of the types that the option could have had."""
        self.config_dump = self.dumped(skip_link_targets=False)
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
        federation.callbacks.insert(0, SaveConfig(self))  # others look at it
        return federation


class SaveConfig(FederationCallback):
    """Keeps the configuration that gave a run, defaults included, in its folder."""

    def __init__(self, cli: FederationCLI) -> None:
        self._parser, self._config = cli._parser(cli.subcommand), cli.config[cli.subcommand]

    def on_fit_start(self, run: RunView) -> None:
        """Write ``config.yaml``; a continued run replaces it, since it may have more rounds. Where it was continued from is no part
        of it: whoever plays it again wants all of the run.
        """
        if run.folder is not None:
            path = run.folder / "config.yaml"
            whole = self._config.clone()
            whole["ckpt_path"] = None
            self._parser.save(whole, path, skip_unset=False, skip_validation=True, multifile=False, overwrite=True)


def run(args: Sequence[str]) -> None:
    """Parse the command line and do what it says."""
    FederationCLI(args)
