"""What is checked before the first turn, or told in words where a first step fails.

``Run.__init__`` calls the checks of networks, tokens and batches before it asks for the run's folder; ``WorkerSpec.build`` that of
the Trainer. They are also called where a run is only looked at.
"""
