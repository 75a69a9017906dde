"""Data preparation in chunks, of which only new ones are prepared again."""
