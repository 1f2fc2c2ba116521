"""What methods of a kind have in common."""
