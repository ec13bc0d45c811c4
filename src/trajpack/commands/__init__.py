"""The sub-commands of ``trajpack``, one file each.

`app` declares their options, `terminal` and `interruption` serve all of them.
"""
