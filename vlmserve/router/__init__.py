"""One OpenAI endpoint in front of many servers: `vlmserve router`."""
