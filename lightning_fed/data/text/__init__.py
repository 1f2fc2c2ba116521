"""Texts, tokenised for a transformer."""
