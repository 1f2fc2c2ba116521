"""Options: their descriptions, an index that needs no torch, and suggestions for misspelt names."""
