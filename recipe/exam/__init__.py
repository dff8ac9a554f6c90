"""The exam: scenes drawn and questions asked by code that the lessons have never seen.

Nothing here imports the rest of `recipe`, and nothing there imports this: a model that has merely learnt its lessons'
own brush strokes and turns of phrase fails here. Needs numpy and pillow; `ask`, which goes through a server, also
openai.

chance, colours, figures -> grounds -> scenes -> wordings, reading -> judges -> items -> v1, v2 -> questions -> report
-> ask.
"""
