"""The run report, one HTML page."""
