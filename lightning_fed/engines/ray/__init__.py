"""Turns in processes of a Ray cluster, on many machines."""
