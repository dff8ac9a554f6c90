"""Messages and arrays between processes."""
