"""Cost, quotas and scheduled runs."""
