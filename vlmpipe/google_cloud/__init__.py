"""Clients of Google Cloud services: credentials, requests and their errors, and buckets."""
