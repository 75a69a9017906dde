"""The three training loops that part `loops` compares."""
