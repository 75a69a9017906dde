"""Where a pipeline runs. Targets differ only in how a job step is executed and what the service is told."""
