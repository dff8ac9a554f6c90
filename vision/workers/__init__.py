"""Where batches are encoded: here, or in worker processes."""
