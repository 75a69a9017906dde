"""Plans of a run before it starts: memory, time and cost."""
