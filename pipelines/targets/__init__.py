"""Where a pipeline runs. Targets differ only in how a job step is executed, and in what the service is told of a step."""
