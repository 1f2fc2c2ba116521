"""What pages of the site have from the code: the gallery of methods, options, public names; and links that lead out of docs."""
