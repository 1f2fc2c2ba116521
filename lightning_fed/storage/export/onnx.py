"""Models as ONNX, for runtimes without PyTorch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from lightning_fed.core.module import FederatedModule
from lightning_fed.data.batches import EXAMPLE
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.text.question_answering import OFFSETS
from lightning_fed.errors import FederationError
from lightning_fed.nn.evaluating import evaluating

IMAGES, LOGITS = "images", "logits"
"""Names of a single input tensor and of the output."""

LARGEST_FILE = 2**31 - 2**24
"""Bytes of weights that fit into one file, beside everything else: a protocol buffer has less than 2 GiB."""


class Predictor(nn.Module):
    """A model that takes its inputs as positional tensors.

    Args:
        module: the model.
        names: names of its inputs. None: it takes one tensor.
    """

    def __init__(self, module: FederatedModule, names: list[str] | None) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        """The outputs of :class:`FederatedModule` for these inputs."""
        [first, *_] = inputs
        return self.module(first if self.names is None else dict(zip(self.names, inputs, strict=True)))


def write_onnx(path: Path, module: FederatedModule, data: ClientDataModule) -> None:
    """Write a model from its inputs (normalized images, or a tokenizer's outputs by name) to the outputs of its ``forward``. The
    number of examples and the length of texts are variable.

    Args:
        path: path of the file; weights that do not fit are written beside it.
        module: the model.
        data: data to trace it with.

    Raises:
        FederationError: if a library is missing, or if the network uses something that ONNX cannot express.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise FederationError(f'ONNX files need {error.name}: pip install "lightning-fed[onnx]".') from error
    inputs = sample(data)
    names = list(inputs) if isinstance(inputs, dict) else None
    tensors = tuple(inputs.values()) if isinstance(inputs, dict) else (inputs,)
    weights = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    predictor = Predictor(module, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with evaluating(predictor):
            torch.onnx.export(
                predictor,
                tuple(tensor.to(module.device) for tensor in tensors),
                path,
                input_names=names or [IMAGES],
                output_names=[LOGITS],
                dynamic_shapes=(tuple(map(free_dimensions, tensors, [names is not None] * len(tensors))),),
                dynamo=True,
                external_data=weights > LARGEST_FILE,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FederationError(f"{type(module).__name__} cannot be exported as ONNX: {reason}. Export it as safetensors.") from error


def sample(data: ClientDataModule) -> Tensor | dict[str, Tensor]:
    """A few examples in the form of a network's inputs: at least two, because a size of one would be taken for a constant."""
    inputs, _ = data.on_after_batch_transfer(next(iter(data.test_dataloader())), 0)
    if isinstance(inputs, Tensor):
        return torch.cat([inputs, inputs])[:2]
    return {name: torch.cat([tensor, tensor])[:2] for name, tensor in inputs.items() if name not in (EXAMPLE, OFFSETS)}


def free_dimensions(tensor: Tensor, text: bool) -> dict[int, Any]:
    """The variable dimensions of an input: the number of examples and, for texts, their length."""
    return dict.fromkeys(range(2 if text and tensor.dim() > 1 else 1), Dim.DYNAMIC)
