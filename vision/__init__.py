"""Floor 2: the ViT towers. Imports `processors` and `vlmserve_common` only."""
