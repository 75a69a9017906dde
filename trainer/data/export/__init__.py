"""Prepared data as files that other trainers read."""
