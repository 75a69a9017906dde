"""The loss of label tokens and of preferences."""
