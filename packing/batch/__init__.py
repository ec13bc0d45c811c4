"""`PackedBatch` and everything that is read from it.

Fields and methods (`batch`), the exact inverse `unpack`, and what a batch holds in
words (`description`).
"""
