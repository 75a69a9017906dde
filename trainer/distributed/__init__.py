"""Processes and how they find each other: cluster environment, rendezvous, watchdog."""
