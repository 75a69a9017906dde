"""The pipeline graph, its compilation, its targets, and its submission, checks and schedules."""
