"""Many media at a time, each answered for itself."""
