"""Approval before money is spent: of runs, jobs and probes."""
