"""`vlmserve bench`: ratios measured in one run, not timed tests."""
