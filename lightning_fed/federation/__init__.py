"""A federation and its runs: rounds, evaluation and costs."""
