"""Matrix products in 8-bit floats (`train.float8`)."""
