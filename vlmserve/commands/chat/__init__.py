"""`vlmserve chat`: a conversation in the terminal, or one question from a script. A client of the HTTP API."""
