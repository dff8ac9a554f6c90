"""Pictures: what a file is, how large it may be, and its pixels."""
