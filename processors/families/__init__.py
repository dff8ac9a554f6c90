"""One processor for each model family."""
