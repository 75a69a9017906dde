"""Memory of a GPU and of its host, part by part and phase by phase."""
