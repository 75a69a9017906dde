"""Steps of the start model's answers, a source of the data (replay: self)."""
