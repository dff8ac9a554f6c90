"""What the built-in model and the samples are made of. Not installed."""
