"""Names of a sweep's files and steps, for those who write them and those who read them."""

SWEEP_FILE = "sweep.json"  # in the folder of the sweep's run
OUTCOME = "outcome.json"  # in a training's folder
JOB_STEP = "train-variants"  # the step of a job is this with its number
