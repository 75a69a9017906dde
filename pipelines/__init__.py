"""The pipeline graph, its compilation, and its submission, checks and schedules."""
