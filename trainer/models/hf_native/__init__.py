"""Models that transformers defines: configurations, weights, and what families of them share."""
