"""`PackedBatch`: the packed tensors and everything that is read from them.

Its fields and methods, the exact inverse `unpack`, files (`storage`, checked by `consistency`), and
the text and pictures of `trajpack inspect`.
"""
