"""Chooses one of several engines or servers for a request, by what is in flight and cached at each."""
