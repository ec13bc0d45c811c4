"""`PackedBatch` and everything that is read from it.

Fields and methods (`batch`), the exact inverse `unpack`, and the text of `trajpack inspect`
(`inspection`).
"""
