"""Samples that `data.exclude` leaves out: the file of their ids."""
