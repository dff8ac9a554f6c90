"""Pictures: file formats, size limits and pixels."""
