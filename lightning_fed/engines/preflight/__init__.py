"""Checks before the first turn, and explanations of a failing first step.

``Run.__init__`` checks networks, tokens and batches before it creates the run's folder, also if a run is opened for reading.
``Site.__init__`` does so where the data stay at their sites. ``WorkerSpec.build`` checks the Trainer.
"""
