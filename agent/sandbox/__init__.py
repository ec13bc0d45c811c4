"""Runs untrusted Python programs in processes without files, network or fork.

`restrictions` limits system calls (seccomp) and files (Landlock); `launcher` runs in each process.
"""
