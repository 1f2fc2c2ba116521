"""Causal language models of any size, for instruction tuning."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.data.hub import optional
from lightning_fed.data.text.generation import IGNORED
from lightning_fed.errors import FederationError, require
from lightning_fed.models.language_model import TransformerLM
from lightning_fed.models.transformer import Inputs, Model
from lightning_fed.options import NonNegativeInt, PositiveInt, require_from

LEARNED = "learned"
"""Name, among the inputs, of the places of tokens whose successor is a target, in the flattened ``input_ids``."""

GENERATED = ("exact_match", "last_number", "rouge_l")
"""What is measured of generated answers alone."""


class CausalLM(TransformerLM):
    """A causal language model that is evaluated by the perplexity of its answers' tokens, and generates texts on request.

    Logits are computed only for tokens whose successor is a target, and the loss in float32. FLOPs count the logits of all tokens,
    so that they are a function of the shapes. A frozen network is in memory once per device, whole or quantised.

    Args:
        num_classes: not used; every network is given it.
        name: see :class:`lightning_fed.models.Transformer`.
        config: see :class:`lightning_fed.models.Transformer`.
        attention: see :class:`lightning_fed.models.Transformer`.
        dtype: precision of the network's weights; ``auto``: that of its files. Trainable weights are float32.
        quantization: load the weights as NF4 (QLoRA, Dettmers et al., NeurIPS 2023; computing in bfloat16) or as 8-bit integers, by
            bitsandbytes (``pip install "lightning-fed[quantized]"``), on a GPU. None: no quantization.
        trust_remote_code: let code of the model's repository run. This needs a local folder, or a name with a revision, so that
            reviewed code cannot change.
        gradient_checkpointing: recompute activations in the backward pass instead of keeping them.
        generate_examples: number of answers that each client generates in each evaluation, to its first examples; 0: none.
        num_beams: width of the beam; 1 is greedy.
        max_new_tokens: longest generated answer in tokens. GSM8K's take up to 512.
        end_token_ids: tokens that stop generation; None: those of the model's generation config. The data score an answer
            up to the token that was learned as its end, whatever follows.
    """

    measures = ("perplexity", *GENERATED)
    lower_is_better = ()

    def __init__(
        self,
        num_classes: PositiveInt = 1,
        name: Model | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        quantization: Literal["nf4", "int8"] | None = None,
        trust_remote_code: bool = False,
        gradient_checkpointing: bool = False,
        generate_examples: NonNegativeInt = 0,
        num_beams: PositiveInt = 1,
        max_new_tokens: PositiveInt = 256,
        end_token_ids: list[int] | None = None,
    ) -> None:
        require_from(0, generate_examples=generate_examples)
        loading = loading_options(name, dtype, quantization, trust_remote_code)
        search: dict[str, Any] = {"length_penalty": 1.0, "no_repeat_ngram_size": 0}
        super().__init__(num_classes, name, config, attention, num_beams, max_new_tokens, **search, **loading)
        if dtype != "auto" and not loading:
            self.network.to(getattr(torch, dtype))
        if gradient_checkpointing:
            network: Any = self.network  # from transformers 5.24 on, the older name is deprecated
            checkpoint = getattr(network, "activation_checkpointing_enable", network.gradient_checkpointing_enable)
            checkpoint({"use_reentrant": False})
            network.disable_input_require_grads()  # for reentrant checkpoints; its hooks cannot be sent to worker processes
        if end_token_ids is not None:
            require(len(end_token_ids) > 0, "end_token_ids is empty: name a token that ends an answer, or leave it out.")
            self._search["eos_token_id"] = end_token_ids
            if self._search["pad_token_id"] is None:
                self._search["pad_token_id"] = end_token_ids[0]
        self.answers_limit = generate_examples

    def select_learned(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        """A batch reduced to learned tokens: the inputs with the positions of the T targets, and the targets, ``(T,)``.

        Args:
            inputs: of the batch.
            targets: ``(B, L)``, :data:`.IGNORED` for tokens that are not learned.
        """
        if self.counts_flops or targets.dim() == 1:
            return inputs, targets
        places = (targets.flatten() != IGNORED).nonzero().flatten()
        return inputs | {LEARNED: places}, targets.flatten()[places]

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits ``(T, V)`` of the token after each selected one, or ``(B, V, L)`` of the token after each."""
        rest: dict[str, Any] = {name: tensor for name, tensor in inputs.items() if name != LEARNED}
        if LEARNED not in inputs:
            return super().forward(rest)
        places = inputs[LEARNED]

        def select(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            return (args[0].flatten(0, 1)[places][None],)  # (1, T, width)

        with self.network.get_output_embeddings().register_forward_pre_hook(select):  # the layers after it get no positions
            return super().forward(rest)[0].T

    def metrics(self, monitor: str) -> dict[str, Metric]:
        if monitor in GENERATED and not self.answers_limit:
            raise FederationError(f"metric is {monitor!r}, which is of generated answers: set the backbone's generate_examples.")
        return super().metrics(monitor)

    def predict(self, inputs: Inputs, targets: Tensor) -> Tensor | None:  # type: ignore[override]
        """Continuations of the prompts before the first target of each row; None if nothing is to be generated."""
        if not self.answers_limit:
            return None
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        whole = torch.full_like(ids, IGNORED).flatten()
        whole[inputs[LEARNED]] = targets
        column = torch.arange(ids.shape[1], device=ids.device) + mask.int().argmax(dim=1)[:, None]  # start of each row
        column %= ids.shape[1]
        return super().predict({"input_ids": ids.gather(1, column)}, whole.view_as(ids).gather(1, column))


def loading_options(name: Any, dtype: str, quantization: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """Arguments of ``from_pretrained``.

    Raises:
        FederationError: for settings that need files, a GPU, or a package that is missing.
    """
    if not isinstance(name, str):
        given = "quantization" if quantization else "trust_remote_code"
        if quantization or trust_remote_code:
            raise FederationError(f"{given} is for models that are loaded: give their name, or leave it out.")
        return {}
    options: dict[str, Any] = {"dtype": dtype}
    if trust_remote_code:
        if "@" not in name and not Path(name).expanduser().is_dir():
            raise FederationError(f"trust_remote_code runs code of {name}, which may change: give {name}@revision, or a folder.")
        options["trust_remote_code"] = True
    if quantization is not None:
        if not torch.cuda.is_available():
            raise FederationError(f"quantization is {quantization!r}, which takes a GPU, and there is none: leave it out.")
        optional("bitsandbytes", "quantized")
        from transformers import BitsAndBytesConfig

        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        options["quantization_config"] = BitsAndBytesConfig(**(four if quantization == "nf4" else {"load_in_8bit": True}))
    return options
