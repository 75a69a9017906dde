"""How training is distributed. A strategy is applied from outside to a model that does not know about it."""
