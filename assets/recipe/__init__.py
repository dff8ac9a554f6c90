"""How the default model is made: scenes drawn on the fly, questions about them, and the training itself.

world -> paint -> wording -> lessons -> batches -> train. Nothing that serves imports this package.
"""
