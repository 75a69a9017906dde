"""Comparison of evaluated runs on the questions that they share."""
