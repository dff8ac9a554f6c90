"""OpenAI's chat and text completions without HTTP: shapes of requests, requests for the engine, and answers.

The API serves them, and `vlmserve caption` reads and writes them in files.
"""
