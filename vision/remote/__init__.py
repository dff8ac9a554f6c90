"""Vision encoders on other servers: `remote_backend` uses them, `encoder_server` and `encode_service` are them."""
