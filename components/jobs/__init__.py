"""Steps that run or collect a job of the training image, one file each."""
