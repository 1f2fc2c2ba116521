"""Texts, tokenized for a transformer."""
