"""The sub-commands of ``trajpack``, one file each.

`app` declares their options, `terminal` serves all of them.
"""
