"""Readers and writers of each resource: one table, from which grants, pages and the doctor's questions are made."""
