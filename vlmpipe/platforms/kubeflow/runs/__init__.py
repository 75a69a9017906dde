"""Runs on Kubeflow Pipelines: started, read and cancelled through its API."""
