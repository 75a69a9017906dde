"""The configuration of a job: the run file's sections that the trainer reads."""
