"""Folders of runs: marker, lock, records and what they say. They are read without the platform that wrote them."""
