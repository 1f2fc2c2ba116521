"""What is checked before the first turn, or told in words where a first step fails."""
