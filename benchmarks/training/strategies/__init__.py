"""Strategies and features of training beside their baselines."""
