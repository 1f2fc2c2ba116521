"""What a process has of its operating system: locks, signals, and the terminal, which messages go to."""
