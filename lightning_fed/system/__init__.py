"""What a process has of its operating system: folders, locks, signals, and the terminal, which messages go to."""
