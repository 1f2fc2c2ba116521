"""The text classifier."""

import torch

from lightning_fed.models import TextTransformer


def test_an_empty_text_has_the_mean_of_no_tokens() -> None:
    model = TextTransformer(4, vocab_size=30, width=16, layers=2).eval()
    with torch.no_grad():
        assert torch.equal(model.encode(torch.tensor([[0, 0], [3, 0]]))[0], torch.zeros(16))


def test_padding_changes_nothing() -> None:
    model = TextTransformer(4, vocab_size=30, max_length=10, width=16, layers=2).eval()
    words = torch.randint(1, 30, (3, 6))
    padded = torch.cat([words, torch.zeros(3, 4, dtype=torch.int64)], dim=1)
    assert model(words).shape == (3, 4)
    assert torch.allclose(model(words), model(padded), atol=1e-5)
    assert model.encode(words).shape == (3, model.cuts["features"])


def test_a_tokenizers_output_is_its_ids_without_what_its_mask_says_is_padding() -> None:
    """Whichever id the tokenizer pads with."""
    model = TextTransformer(4, vocab_size=30, max_length=8, width=16, layers=1).eval()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]])
    padded_with_one = ids.where(mask == 1, 1)
    inputs = {"input_ids": padded_with_one, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(model(inputs), model(ids))
