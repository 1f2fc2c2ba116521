"""Files of a run: its folder, checkpoints and private states."""
