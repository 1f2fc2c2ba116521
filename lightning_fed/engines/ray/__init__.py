"""The engine Ray: turns in processes of a Ray cluster, on many machines."""
