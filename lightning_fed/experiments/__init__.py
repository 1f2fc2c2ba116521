"""Comparisons: what is played, and tables and pictures of it. Nothing here waits for torch."""
