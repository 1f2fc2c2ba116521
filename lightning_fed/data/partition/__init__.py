"""Who holds which examples: subclasses of ``Partitioner`` (``base.py``), one file per kind; ``lightning_fed.data`` exports them."""
