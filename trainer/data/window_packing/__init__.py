"""Packing of the windows of an epoch: which sequence each sample goes into."""
