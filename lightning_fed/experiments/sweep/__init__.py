"""Many runs of one comparison: what is to be played, and who plays it. Nothing here waits for torch."""
