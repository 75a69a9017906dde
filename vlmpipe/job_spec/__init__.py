"""Vertex AI CustomJob specs: built from a run file, read from a file, checked."""
