"""Where pipelines and jobs run: this machine, Vertex AI, Kubeflow."""
