"""Requests to Amazon S3 and servers with its API: the client, and its errors for people."""
