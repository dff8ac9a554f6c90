"""Which replica gets which request (`--dp-size`)."""
