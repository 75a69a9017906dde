"""Pretrained weights that come inside ordinary packages, for runs that start from real ones without a download."""
