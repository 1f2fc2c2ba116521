"""Your own data, in common file formats."""
