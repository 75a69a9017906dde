"""A source of the mixture that holds the start model's own answers: where it is kept, and what is asked."""
