"""Jobs as TrainJobs of Kubeflow Trainer."""
