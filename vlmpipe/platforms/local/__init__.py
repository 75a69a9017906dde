"""This machine: the pipeline and its jobs as processes."""
