"""Built-in data sets that are made from the pictures of a package."""
