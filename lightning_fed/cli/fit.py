"""A LightningCLI that builds the objects of a federation from a configuration."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import yaml
from jsonargparse import ActionConfigFile, Namespace  # type: ignore[attr-defined]  # public by its documentation
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

import lightning_fed.data
import lightning_fed.methods
import lightning_fed.models  # noqa: F401 - imported so that short class names work
from lightning_fed.callbacks import FederationCallback, RunView, Summary
from lightning_fed.cli import OF_FEDERATION
from lightning_fed.cli.checks import PREFIX, check_config, check_variables
from lightning_fed.cli.parser import MODE, OF_DUMPS, Parser, refuse_broken_files
from lightning_fed.cli.refusals import shorten
from lightning_fed.cli.trainer import build_trainer, settings_of
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines.preflight.trainer_options import REFUSED
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.experiments.configs import found, is_yaml
from lightning_fed.federation.federation import Federation


class ClientTrainer(L.Trainer):
    """Where LightningCLI finds options: those of a Trainer, and the verbs of a federation."""


for verb in OF_FEDERATION:
    setattr(ClientTrainer, verb, getattr(Federation, verb))


class ConfigFile(ActionConfigFile):
    """A configuration: a file, the name of one that comes with the package, or YAML."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, cfg, values if is_yaml(values) else str(found(values)), option_string)


class FederationCLI(LightningCLI):
    """The verbs of a federation, configured by ``data``, ``model``, ``federation`` and ``trainer``.

    Args:
        args: the verb and its options.
        do: called with this object once the objects are built. None: run the verb.
    """

    config: Any
    """What was parsed."""

    config_dump: dict[str, Any]
    """The configuration that modules store. Lightning would validate all of it again, which takes longer than building it."""

    def __init__(self, args: Sequence[str], do: Callable[["FederationCLI"], None] | None = None) -> None:
        refuse_broken_files(args)
        self.verbs = [verb for verb in OF_FEDERATION if args and args[0] == verb] or list(OF_FEDERATION)
        self._do = do
        with quiet_lightning():
            # Lightning warns about arguments that are passed while sys.argv has some; main() passes exactly those.
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
        """Objects of jsonargparse (an optimizer to be built, for example) refer to the command line that made them, and so to all
        its objects. A copy that is sent to another process has no command line.
        """
        return type(None), ()

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The requested verb, or all verbs, with their arguments that are not options. Each has a parser with all options of
        Trainer and federation, which takes time to build.
        """
        return {verb: {"model", "datamodule"} for verb in self.verbs}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """The parser of a verb, or of all."""
        parser = Parser(**kwargs)
        parser.refused |= {f"trainer.{name}" for name in (*REFUSED, *QUIET)}
        text = "A configuration: a YAML file, or a name that lightning-fed configs lists. Later ones take precedence."
        parser.add_argument("-c", "--config", action=ConfigFile, help=text)
        return parser

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the blocks in the order of the documentation, which is also that of ``config.yaml``."""
        parser.add_lightning_class_args(FederatedDataModule, "data", subclass_mode=True)
        parser.add_lightning_class_args(FederatedModule, "model", subclass_mode=True)
        parser.add_class_arguments(Federation, "federation", skip={"trainer"})
        parser.add_lightning_class_args(ClientTrainer, "trainer")
        parser.set_defaults({f"trainer.{name}": value for name, value in self.trainer_defaults.items()})
        for part in ("train", "val", "test", "predict"):  # Python may give Lightning's types as float | int: 1 would be 1.0, all
            option: Any = parser._option_string_actions[f"--trainer.limit_{part}_batches"]
            option._typehint = int | float | None

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link options of one block to another."""
        parser.link_arguments("seed_everything", "federation.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)
        parser.link_arguments("data.num_classes", "model.init_args.num_classes", apply_on="instantiate")
        parser.link_arguments("data.problem", "model.init_args.task", apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, after a check of the environment. The outer parser would parse all of them twice; it is the one that
        answers ``--print_config``.
        """
        if len(self.verbs) == 1:
            (verb,) = self.verbs
            check_variables(verb, own := self._subcommand_parsers[verb])
            if not any(arg.startswith("--print_config") for arg in args):
                self.config = Namespace({"subcommand": verb, verb: own.parse_args(args[1:])})
                return
        super().parse_arguments(parser, args)

    def _parse_ckpt_path(self) -> None:
        """Keep Lightning from reading hyperparameters of a checkpoint, which would override the command line. The next steps seed
        and build objects, so the configuration is checked here.
        """
        check_config(self.config[self.config["subcommand"]])

    def dumped(self, **options: bool) -> dict[str, Any]:
        """The whole configuration of the verb, with defaults, as names and numbers, with further options of jsonargparse's
        ``dump``. It was validated when it was parsed.
        """
        text = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_unset=False, skip_validation=True, **options)
        configuration: dict[str, Any] = yaml.load(text, Loader=OF_DUMPS)
        return configuration

    def instantiate_classes(self) -> None:
        """Build the objects. jsonargparse wraps a constructor's error in a list of the option's types, which is shortened."""
        self.config_dump = self.dumped(skip_link_targets=False)
        try:
            super().instantiate_classes()
        except ValueError as error:
            if isinstance(error, FederationError) or "any of the Union subtypes" not in str(error):
                raise
            raise FederationError(shorten(str(error))) from error

    def instantiate_trainer(self, **kwargs: Any) -> Federation:  # type: ignore[override]
        """Build the federation in the Trainer's place; it builds a Trainer per turn from the ``trainer`` block."""
        settings = settings_of(dict(self._get(self.config_init, "trainer").items()))
        federation: Federation = self._get(self.config_init, "federation")
        federation.new_trainer = partial(build_trainer, settings)
        federation.callbacks.insert(0, SaveConfig(self))  # other callbacks read the file
        if self.subcommand in ("validate", "test") and not any(isinstance(each, Summary) for each in federation.callbacks):
            federation.callbacks.append(Summary())  # without progress, too: nothing else says what was measured
        return federation


class SaveConfig(FederationCallback):
    """Saves the run's configuration, with defaults, in its folder."""

    def __init__(self, cli: FederationCLI) -> None:
        self._parser, self._config = cli._parser(cli.subcommand), cli.config[cli.subcommand]

    def on_fit_start(self, run: RunView) -> None:
        """Write ``config.yaml``. A continued run replaces it, because it may have more rounds. ``ckpt_path`` is left out, so that
        the file repeats the whole run.
        """
        if run.folder is not None:
            path = run.folder / "config.yaml"
            whole = self._config.clone()
            whole["ckpt_path"] = None
            self._parser.save(whole, path, skip_unset=False, skip_validation=True, multifile=False, overwrite=True)


def run(args: Sequence[str]) -> None:
    """Run a command line."""
    FederationCLI(args)
