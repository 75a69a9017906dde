"""Cost, quotas, scheduled runs, and approval before money is spent."""
