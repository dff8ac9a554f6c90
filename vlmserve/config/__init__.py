"""Settings: their definitions, and where their values come from."""
