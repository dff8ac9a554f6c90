"""Videos: which frames are used, and how they are decoded."""
