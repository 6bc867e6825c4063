"""What runs when a process imports SGLang.

``loader.py`` comes first. ``hooks.py`` runs ``environ.py`` and ``cache.py``, the hooks of
SGLang's modules of those names; ``lookup.py`` is part of the latter. Nothing is imported
here, for the reason given in ``loader.py``.
"""
