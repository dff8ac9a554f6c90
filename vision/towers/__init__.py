"""Vision towers and their inputs."""
