"""What SGLang's JIT cache holds, and what SGLang would make of it: all commands ask here.

``disk.py`` reads a cache without SGLang; ``launch.py`` asks SGLang itself, by what
``recorded.py`` reads in a leaf. Nothing here is loaded but by the command line.
"""
