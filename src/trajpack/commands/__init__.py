"""The sub-commands of ``trajpack``: `app` declares their options and imports their work."""
