"""Comparisons: the runs of sweeps, and tables and pictures of them. Nothing here loads torch."""
