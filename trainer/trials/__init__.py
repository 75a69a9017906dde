"""Trainings of one job after the other: trials of a search, and variants of a sweep."""
