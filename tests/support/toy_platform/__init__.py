"""A fourth platform: all of it is this folder, and a line of the table that a test adds."""
