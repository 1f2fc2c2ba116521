"""Data of one's own, in the forms in which people have them."""
