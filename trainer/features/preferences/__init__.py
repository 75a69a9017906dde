"""Training on pairs of a chosen and a rejected answer (`train.objective` dpo and simpo)."""
