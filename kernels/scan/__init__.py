"""The reverse scan: one linear recurrence per segment, from the last token to the first.

Returns and all advantage estimators are this recurrence with different coefficients. `observations`
turns the conventions for observation tokens into coefficients, `exclusive_scan` is the reference in
plain torch, and the `_triton` files are the kernels.
"""
