"""Accounting of data preparation: what of each record was read, and what was not."""
