"""A trained model asked about images of a user."""
