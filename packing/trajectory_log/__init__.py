"""`TrajectoryLog`: finished episodes in one SQLite file.

Flushed episodes are durable, readers may run beside the writer, and a row of the file never
changes.
"""
