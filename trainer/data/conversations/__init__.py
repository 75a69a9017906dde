"""Conversations of records in the layouts that data sets have, as turns of questions and answers."""
