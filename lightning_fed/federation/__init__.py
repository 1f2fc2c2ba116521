"""A federation and one run of it: the rounds, what is measured after them, what they cost."""
