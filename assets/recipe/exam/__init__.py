"""The exam: scenes drawn and questions asked by code that the lessons have never seen.

Nothing here imports the rest of `recipe`, and nothing there imports this: a model that has merely learnt its lessons'
own brush strokes and turns of phrase fails here. Needs numpy, pillow and av; `ask`, which goes through a server, also
openai. Texts come in more faces if matplotlib is installed.

Version v1 has one to three things, one picture, one turn. Version v2 adds up to six things, how they lie to each other,
several pictures, a second turn. Version v3 adds printed words and numbers, and bounding boxes in JSON. Version v4 adds
short clips.

chance, colours, figures -> grounds, texts -> scenes -> signs, clips -> wordings, reading, clip_reading -> judges,
print_judges, clip_judges -> items -> v1, v2, v3, v4 -> questions -> report -> ask.
"""
