"""Language models of the transformers library that continue texts."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from torchmetrics.text import Perplexity

from lightning_fed.data.text.generation import IGNORED
from lightning_fed.errors import FederationError, require
from lightning_fed.models.transformer import Inputs, Model, Transformer
from lightning_fed.options import NonNegativeInt, PositiveInt, require_from

PADDING = -1
"""Stands left of prompts that are shorter than others; no token has this number."""


class TransformerLM(Transformer):
    """A causal language model, fine-tuned to continue a prompt, which answers with beam search.

    Its head is part of the pretrained model and stays frozen, even if it is not tied to the embeddings, unless the model's
    files lack it. The defaults of the search are those of LoRA's experiments with GPT-2 (Hu et al., ICLR 2022) on WebNLG, except
    ``max_new_tokens``.

    Args:
        num_classes: not used; every network is given it.
        config: see :class:`lightning_fed.models.Transformer`; ``bos_token_id`` and ``eos_token_id`` must be the tokenizer's.
        num_beams: width of the beam; 1 is greedy.
        max_new_tokens: longest answer in tokens. LoRA's scripts stop at 64.
        length_penalty: the sum of log-probabilities is divided by the answer's length to this power; above 0, larger values favour
            longer answers. From -50 to 50. LoRA's experiments: 0.8 on WebNLG, 0.9 on E2E.
        no_repeat_ngram_size: no answer repeats a sequence of this many tokens; sequences of the prompt may be repeated. 0: no
            restriction.
        **settings: see :class:`lightning_fed.models.Transformer`.
    """

    auto_class = "AutoModelForCausalLM"
    peft_task = "CAUSAL_LM"
    measures: tuple[str, ...] = ("bleu", "nist", "meteor", "rouge_l", "cider", "ter", "perplexity")
    lower_is_better: tuple[str, ...] = ("ter",)

    def __init__(
        self,
        num_classes: PositiveInt = 1,
        name: Model | None = None,
        config: dict[str, Any] | None = None,
        attention: str | None = None,
        num_beams: PositiveInt = 10,
        max_new_tokens: PositiveInt = 128,
        length_penalty: float = 0.8,
        no_repeat_ngram_size: NonNegativeInt = 4,
        **settings: Any,
    ) -> None:
        super().__init__(name, config, attention, **settings)
        self._refuse_encoders()
        require_from(1, num_beams=num_beams, max_new_tokens=max_new_tokens)
        require_from(0, no_repeat_ngram_size=no_repeat_ngram_size)
        require(abs(length_penalty) <= 50, f"TransformerLM got length_penalty={length_penalty}: give a number from -50 to 50.")
        self.max_new_tokens: int = max_new_tokens
        generation = self.network.generation_config
        self._search: dict[str, Any] = {
            "do_sample": False,
            "num_beams": num_beams,
            "max_new_tokens": max_new_tokens,
            "no_repeat_ngram_size": no_repeat_ngram_size,
            "pad_token_id": _first(generation.eos_token_id) if generation.pad_token_id is None else generation.pad_token_id,
        }
        if num_beams > 1:  # otherwise the library warns of it
            self._search["length_penalty"] = length_penalty

    def forward(self, inputs: Inputs) -> Tensor:
        """Logits ``(B, V, L)`` of the token of the vocabulary that follows each of L, in float32, for sums over many tokens."""
        given: dict[str, Any] = {**inputs, "use_cache": False}
        return super().forward(given).float().transpose(1, 2)

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that stop generation."""
        ends: list[int] | int | None = self._search.get("eos_token_id", self.network.generation_config.eos_token_id)
        return [] if ends is None else [ends] if isinstance(ends, int) else ends

    def targets_of(self, inputs: dict[str, Tensor]) -> Tensor:
        """Shift ``labels``, which the library aligns with their own tokens, so that each token's target is the next one."""
        labels = inputs.pop("labels")
        return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)

    def metrics(self, monitor: str) -> dict[str, Metric]:
        return {"perplexity": PerplexityOfClasses(ignore_index=IGNORED)}

    def predict(self, inputs: Inputs, targets: Tensor) -> Tensor:
        """Continuations of the prompts: token ids ``(B, T)`` without the prompt, padded after the end of an answer. T is at most
        ``max_new_tokens``.

        Args:
            inputs: prompts and the tokens that follow them.
            targets: a prompt ends with the token that has the first target.
        """
        ids = inputs["input_ids"]
        lengths = (targets != IGNORED).int().argmax(dim=1) + 1
        longest = int(lengths.max())
        self.check_room(longest)
        column = torch.arange(longest, device=ids.device) + (lengths - longest)[:, None]  # negative left of a prompt
        prompts = ids.gather(1, column.clamp(min=0)).masked_fill(column < 0, PADDING)
        prompts, row = prompts.unique(dim=0, return_inverse=True)  # rows of one example have the same prompt
        # Passed as embeddings, the prompts are exempt from this rule: answers have to repeat their names.
        embeddings = self.network.get_input_embeddings()(prompts.clamp(min=0))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Passing `no_repeat_ngram_size` with `inputs_embeds`")  # says just that
            answers: Tensor = self.network.generate(  # type: ignore[operator]
                inputs_embeds=embeddings, attention_mask=(prompts != PADDING).long(), **self._search
            )
        return answers[row]

    def head_names(self) -> set[str]:
        """Names of the parameters that its files lack; the task adds none."""
        return set(self.drawn)

    def _refuse_encoders(self) -> None:
        """The library builds BERT and others that fill in blanks as language models, too, with only a warning in its log."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        config = self.network.config
        if config.model_type in ENCODERS and not (getattr(config, "is_decoder", False) or getattr(config, "causal", False)):
            raise FederationError(
                f"{type(self.network).__name__} reads texts in both directions, so it would see the tokens that it is to predict: "
                "choose a causal language model, or set is_decoder in its config."
            )

    def check_room(self, longest: int) -> None:
        """Raises :class:`FederationError` if a prompt of this many tokens and an answer do not fit in the network's positions."""
        positions = getattr(self.network.config, "max_position_embeddings", None)
        if positions is not None and longest + self.max_new_tokens > positions:
            raise FederationError(
                f"A prompt of {longest} tokens and max_new_tokens={self.max_new_tokens} do not fit in the network's {positions} "
                "positions: lower max_new_tokens or choose another network."
            )


def _first(tokens: list[int] | int | None) -> int | None:
    """The only one, or the first, of the tokens that end a text."""
    return tokens[0] if isinstance(tokens, list) else tokens


class PerplexityOfClasses(Perplexity):
    """Perplexity of logits ``(B, V, L)``, the classes in the second dimension as everywhere in PyTorch, or ``(T, V)``.

    It is the exponential of the mean cross-entropy. The base class takes the logarithm of a softmax, which is 0 for an unlikely
    token, so that one of them makes the perplexity infinite.
    """

    total_log_probs: Tensor
    count: Tensor

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add a batch; targets are ``(B, L)``, or ``(T,)``."""
        self.total_log_probs += cross_entropy(preds.float(), target, ignore_index=IGNORED, reduction="sum")
        self.count += (target != IGNORED).sum()
