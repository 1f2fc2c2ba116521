"""What a run writes: checkpoints, private states, its folder."""
