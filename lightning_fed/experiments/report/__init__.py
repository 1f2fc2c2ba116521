"""Tables and pictures of finished runs, from their files only. Nothing here loads torch."""

from lightning_fed.experiments.report.runs import load_clients, load_crossed, load_rounds, load_runs, read_runs

__all__ = ["load_clients", "load_crossed", "load_rounds", "load_runs", "read_runs"]
