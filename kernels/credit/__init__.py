"""Public ops for credit assignment over time.

Discounted returns, GAE, TD(lambda), V-trace and GAE over turns.
Each op states its recurrence and calls the scan of `trajpack.kernels.scan`. `scores` and `spread`
convert between one value per turn and one value per token.
"""
