"""Steps of groups of ranks that have requests of their own, computed together: rounds."""
