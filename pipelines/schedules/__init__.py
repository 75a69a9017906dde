"""Recurring runs on Vertex AI."""
