"""Sizes and FLOPs by arithmetic, without torch: what the trainer and the planner share."""
