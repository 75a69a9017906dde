"""Money on the screen: the bill of a run."""
