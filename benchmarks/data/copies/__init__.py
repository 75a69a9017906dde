"""Copies of images: those that preparation looks for, and those that the data audit finds."""
