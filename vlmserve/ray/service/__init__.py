"""The OpenAI server as an app of Ray Serve. `app` puts the parts together; `plan`, `choosing` and `scaling` need no
Ray."""
