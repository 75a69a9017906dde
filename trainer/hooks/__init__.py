"""Hooks by which features take part in training, and the table of features."""
