"""Files of batches and of trees.

A file holds what `pack` reads, and beside it what was computed later: it cannot disagree with
itself. What `load` returns has the bits of what `save` was given.
"""
