"""What a run counts: traffic, spreads, FLOPs."""
