"""Runs untrusted Python programs in processes without files, network or fork.

System calls are limited by `filter` (seccomp), files by `files` (Landlock), memory and time by
`limits`.
"""
