"""What may help a training that diverged: its learning rate, and what else of its method is not as it usually is."""

from lightning_fed.core.module import FederatedModule
from lightning_fed.options import parameters_of


def remedy(module: FederatedModule, rate: str = "the learning rate") -> str:
    """What to change, which completes an error's sentence.

    Args:
        module: what diverged.
        rate: which learning rate it had, as far as that is known.
    """
    chosen = [f"model.{name}={value:g}" for name, value in chosen_numbers(module).items()]
    return f"lower {rate}{''.join(f', change {each}' for each in chosen)}, or set model.gradient_clip"


def chosen_numbers(module: FederatedModule) -> dict[str, float]:
    """The numbers that a module was made with where its class has other defaults, by name: rates, scales and weights of terms.
    Whole numbers are of sizes and durations, with which nothing diverges.
    """
    usual = {name: parameter.default for name, (parameter, _) in parameters_of(type(module)).items()}
    return {
        name: value
        for name, value in module.hparams.items()
        if isinstance(value, float) and name in usual and value != usual[name] and name != "gradient_clip"
    }
