"""A tokenizer with a chat template, tiny language models of three kinds, and instructions in the usual forms."""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML that marks what is learned: content and end."""

UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

FORGETFUL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
"""Writes no answer but the last one, as others leave out earlier thoughts."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def save_chat_tokenizer(folder: Path, template: str | None = MARKED, **options: Any) -> str:
    """One that knows all bytes, and no token for padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate([*SPECIAL, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, *chat = SPECIAL
    options = {"bos_token": end, "eos_token": end, "additional_special_tokens": chat} | options
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


SIZES: dict[str, Any] = {"vocab_size": 264, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.3}
LLAMA_SIZES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 256, **SIZES},
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LLAMA_SIZES},
    "qwen": {"model_type": "qwen2", **LLAMA_SIZES},
    "gpt2": {"model_type": "gpt2", "n_positions": 256, "n_embd": 16, "n_layer": 2, "n_head": 2, **SIZES},
}
TINY_MODELS["gpt2"] |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

QUESTIONS = [("What is 1 + 2?", "3"), ("Say hi, twice.", "hi hi"), ("Name a river", "the Po"), ("Two\nlines?", "yes,\nand no")]


def chats(copies: int = 1, turns: int = 1) -> list[dict[str, Any]]:
    """Questions and answers of so many turns, and whose they are."""
    made = []
    for number in range(copies * len(QUESTIONS)):
        said = [QUESTIONS[(number + turn) % len(QUESTIONS)] for turn in range(turns)]
        messages = [
            {"role": role, "content": f"{text} {number}" if role == "user" else text}
            for pair in said
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        made.append({"messages": messages, "who": f"author {number % 2}", "task": number % 3})
    return made


def write_lines(path: Path, records: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)
