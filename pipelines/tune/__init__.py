"""Searches over training settings."""
