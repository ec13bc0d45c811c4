"""Credit assignment over time: discounted returns, GAE, TD(λ), V-trace and GAE over turns.

Each op states its recurrence and calls the scan of `trajpack.kernels.scan`. `turns` has the ops
that a packed batch needs: scans along its turns, scores, and values copied to tokens.
"""
