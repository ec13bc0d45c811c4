"""`TrajectoryLog`: finished episodes in one SQLite file.

An append is durable when it returns, readers may run beside the writer, and a damaged file can be
salvaged. `parquet` exports and reads Parquet.
"""
