"""Runs on Vertex AI."""
