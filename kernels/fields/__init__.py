"""Ops that write the per-token fields of a batch.

`build` expands the run table of a layout into token ids, masks, positions and log-probabilities in
one launch. `gather_fields` does the same for fields that a user declares.
"""
