"""Property tests try the same examples in every run: a failure is the change's doing, not the dice's."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
