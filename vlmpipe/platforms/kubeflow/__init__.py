"""Kubeflow: runs of Kubeflow Pipelines, TrainJobs and InferenceServices in a cluster."""
