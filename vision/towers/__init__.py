"""Vision towers, and what they take."""
