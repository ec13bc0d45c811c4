"""`TrajectoryLog`: finished episodes in one SQLite file.

Flushed episodes are durable, readers may run beside the writer, and episodes of a damaged file can
be salvaged. `parquet` exports Parquet, and reads logs of an earlier release.
"""
