"""Partitions of examples among clients: subclasses of ``Partitioner`` (``base.py``), one file per kind."""
