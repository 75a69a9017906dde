"""Where jobs run: this machine, Vertex AI, Kubeflow."""
