"""All runs of an output folder: what they take, what refers to them, and their removal."""
