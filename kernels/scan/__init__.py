"""The reverse scan: one linear recurrence per segment, from the last token to the first.

Returns and all advantage estimators are this recurrence with different coefficients. `observations`
names the conventions for tokens that were not generated, `scan_inputs` holds the inputs and their
checks, `credit_scan` the op and its reference, `credit_scan_triton` the kernels. `segment_sum` sums
segments: on a device a sum is the undiscounted return of the segment's first entry.
"""
