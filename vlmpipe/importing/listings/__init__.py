"""Python listings of guides: the jobs that they make, read from their syntax."""
