"""From a registered model to one that answers: servers here and in the cloud, asked what `evaluate` asked."""
