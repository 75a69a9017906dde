"""The pipeline's steps as KFP components, one file each."""
