"""What is known about a run before it costs anything."""
