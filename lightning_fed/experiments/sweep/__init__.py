"""Sweeps: the runs of a comparison, and how they are run. Nothing here loads torch."""
