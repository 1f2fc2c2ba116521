"""Conversations formatted by a chat template, and which of their tokens are trained."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_fed.data.text.conversations import Conversation
from lightning_fed.errors import FederationError, one_line, require

Learn = Literal["answers", "last_answer", "all"]
"""Which part of a conversation is trained."""

MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag before the assistant's messages in templates that mark them."""

HALVES = re.compile("[\\ud800-\\udfff]")
"""Surrogate code points: two make a character, one alone is invalid."""

TEMPLATES = {
    "chatml": "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'].removesuffix('<|im_end|>') + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "alpaca": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'].removesuffix(eos_token) + eos_token }}{% endgeneration %}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\n\n' }}"
    "{% else %}{% if loop.first %}{{ 'Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n' }}{% endif %}{{ '### Instruction:\n' + message['content'] + '\n\n### Response:\n' }}{% endif %}{% endfor %}",
    "plain": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'].removesuffix(eos_token) + eos_token }}{% endgeneration %}{% else %}{{ message['content'] + '\n' }}"
    "{% endif %}{% endfor %}",
}
"""Templates for networks whose tokenizers have none, by name. ``chatml`` is for tokenizers that have its two tokens. An answer that
already ends with the end token gets no second one.
"""


class Span(NamedTuple):
    """A range of characters of a text."""

    start: int
    end: int


class ChatTemplate:
    """Converts conversations to tokens.

    Args:
        tokenizer: a fast tokenizer of the transformers library, which knows the position of each token in a text.
        given: the template: a name of :data:`TEMPLATES`, a file, or the template itself. None: the tokenizer's.
        learn: what is trained.
        variables: further variables of the template, by name: ``date_string``, ``enable_thinking``, …. Those of a conversation
            come before them.

    Raises:
        FederationError: for a tokenizer that is not fast.
    """

    def __init__(self, tokenizer: Any, given: str | None, learn: Learn, variables: dict[str, Any]) -> None:
        require(tokenizer.is_fast, f"The tokenizer {tokenizer.name_or_path} is not a fast one: give a folder with tokenizer.json.")
        self.tokenizer, self.learn, self.variables = tokenizer, learn, variables
        file = Path(given).expanduser() if given and len(given) < 256 and "{" not in given else None
        self.text: str | None = tokenizer.chat_template if given is None else TEMPLATES.get(given, given)
        if file is not None and given not in TEMPLATES:
            require(file.is_file(), f"Got template={given!r}: give one of {', '.join(TEMPLATES)}, a file, or a template itself.")
            self.text = file.read_text(encoding="utf-8")

    def encode(self, conversation: Conversation, where: str) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether it is trained.

        Raises:
            FederationError: if the template refuses the conversation, or it cannot be determined what is trained; begins with
                ``where``, file and record.
        """
        if not conversation.is_chat:
            text, spans = self._written(*conversation.messages)
            _check_unicode(text, where)
        else:
            text = self.render(conversation.messages, conversation.variables, where)
            _check_unicode(text, where)
            if self.learn == "all":
                spans = [Span(0, len(text))]
            elif conversation.start is None and MARK.search(self.text or ""):
                return self._marked(conversation, where)
            else:
                spans = list(self._spans(conversation, text, where))
        options = {"add_special_tokens": not conversation.is_chat, "return_offsets_mapping": True, "verbose": False}
        encoded = self.tokenizer(text, **options)
        offsets = encoded["offset_mapping"]  # tokens that the tokenizer adds have (0, 0)
        learned = [any(start < span.end and end > span.start for span in spans) for start, end in offsets]
        return encoded["input_ids"], [True] * len(learned) if self.learn == "all" else learned

    def _written(self, prompt: Any, answer: Any) -> tuple[str, list[Span]]:
        """A prompt and its completion without a template, and the token that ends a text."""
        end = self.tokenizer.eos_token or ""
        text = prompt + (answer if end and answer.endswith(end) else answer + end)
        return text, [Span(len(prompt), len(text))]

    def _marked(self, conversation: Conversation, where: str) -> tuple[list[int], list[bool]]:
        """Tokens and trained tokens by the template's marks."""
        options = {"return_dict": True, "return_assistant_tokens_mask": True, "tokenizer_kwargs": {"verbose": False}}
        encoded = self._apply(conversation.messages, conversation.variables, where, tokenize=True, **options)
        learned = [bool(mark) for mark in encoded["assistant_masks"]]
        require(any(learned), f"{where} has an answer that the template does not mark: put {{% generation %}} around all of them.")
        if self.learn == "last_answer":
            last = max(place for place, mark in enumerate(learned) if mark)
            first = max((place for place in range(last) if not learned[place]), default=-1) + 1
            learned = [first <= place <= last for place in range(len(learned))]
        return list(encoded["input_ids"]), learned

    def _spans(self, conversation: Conversation, text: str, where: str) -> Iterator[Span]:
        """Trained ranges by prefixes: what is written up to an answer, and up to its end, must be how the whole text starts."""
        messages, variables = conversation.messages, conversation.variables
        answers = [place for place, message in enumerate(messages) if isinstance(message, dict) and message["role"] == "assistant"]
        if conversation.start is not None or self.learn == "last_answer":
            start = answers[-1] if conversation.start is None else conversation.start
            before = self.render(messages[:start], variables, where, ask=True)
            self._check_prefix(before, text, where)
            yield Span(len(before), len(text))
            return
        for place in answers:
            before = self.render(messages[:place], variables, where, ask=True)
            through = self.render(messages[: place + 1], variables, where)
            self._check_prefix(before, through, where)
            self._check_prefix(through, text, where)
            yield Span(len(before), len(through))

    def _check_prefix(self, prefix: str, text: str, where: str) -> None:
        if text.startswith(prefix):
            return
        same = next((place for place, pair in enumerate(zip(prefix, text, strict=False)) if pair[0] != pair[1]), len(text))
        others = "all" if self.learn == "last_answer" else "last_answer or all"
        raise FederationError(
            f"{where}: the answers' tokens cannot be found, since the template does not mark answers (no {{% generation %}}) and "
            f"writes turns differently when more follow ({prefix[same : same + 40]!r} becomes {text[same : same + 40]!r}). Set "
            f"--data.init_args.learn to {others}, or --data.init_args.template to a template that marks answers."
        )

    def render(self, messages: Sequence[Any], variables: Mapping[str, Any], where: str, ask: bool = False) -> str:
        """Messages of a conversation in the format of the template, with the conversation's variables; ``ask`` appends the prompt
        for an answer. Errors begin with ``where``.
        """
        text: str = self._apply(messages, variables, where, tokenize=False, add_generation_prompt=ask)
        return text

    def _apply(self, messages: Sequence[Any], variables: Mapping[str, Any], where: str, **options: Any) -> Any:
        from jinja2.exceptions import TemplateError

        require(
            self.text is not None,
            f"The tokenizer {self.tokenizer.name_or_path} has no chat template: set template to one of {', '.join(TEMPLATES)}, a "
            "file, or a template itself.",
        )
        try:
            given = self.variables | dict(variables)
            return self.tokenizer.apply_chat_template(list(messages), chat_template=self.text, **options, **given)
        except (TemplateError, TypeError, ValueError) as error:
            raise FederationError(f"{where} is refused by the chat template ({one_line(error)}).") from error


def _check_unicode(text: str, where: str) -> None:
    """Refuse half of a character, which JSON can express and no tokenizer takes."""
    half = HALVES.search(text)
    require(half is None, f"{where} has {half and half[0]!r}, half of a character: write both halves, or leave it out.")
