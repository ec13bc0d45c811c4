"""A page that shows a packed batch, in one file without scripts.

`figures` computes plain numbers and names, which are also written as JSON; `page` draws them.
"""
