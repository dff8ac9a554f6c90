"""`vlmserve cache`: the embedding cache on disk, looked at and cleared by hand."""
