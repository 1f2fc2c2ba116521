"""Checks before the first turn, and explanations of a failing first step.

``Run.__init__`` checks networks, tokens and batches before it creates the run's folder; ``WorkerSpec.build`` checks the Trainer.
The checks also run if a run is opened for reading.
"""
