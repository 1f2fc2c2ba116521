"""Tables of numbers."""
