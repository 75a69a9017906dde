"""The steps of a pipeline: their machines, disks, time and money."""
