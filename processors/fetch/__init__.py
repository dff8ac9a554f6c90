"""From what a request names to bytes."""
