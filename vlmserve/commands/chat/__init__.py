"""`vlmserve chat`: a conversation in the terminal, or one question of a script. A client of the HTTP API."""
