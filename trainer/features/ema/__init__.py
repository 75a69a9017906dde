"""The moving average of trained weights (`train.ema_decay`)."""
