"""`vlmpipe doctor`: asks Google Cloud and the hub whether what a run file names is there and allowed."""
