"""Why a rival is faster, where one is: the tables print it, and a test asks for it.

Each goes on from "Because".
"""

TRUSTS = (
    "they trust their input: ids and log-probabilities are not checked, prefixes not compared, "
    "nothing is stored, and nothing comes back from the batch; ours pays for that once a call, "
    "once a trajectory and once a token"
)
CONVOLUTION = (
    "it is one convolution in float32, its filter cut where a power is below 1e-7; ours sums in "
    "float64"
)
COMPILED = "they are compiled loops over the sequences; ours on the host is numpy"
REASONS = {
    "Python lists": TRUSTS,
    "Python lists, 3 fields": TRUSTS,
    "numpy.concatenate per field": TRUSTS,
    "torch.cat per field": TRUSTS,
    "pad, then mask": TRUSTS,
    "torch.nested jagged": TRUSTS,
    "numpy.concatenate, then a copy": TRUSTS,
    "torch.cat per field, then copies": TRUSTS,
    "transformers DataCollatorWithFlattening": (
        "it writes four of eleven fields, from features made before, and checks nothing"
    ),
    "trl padding-free collator": (
        "it writes five of eleven fields, from features made before, and checks nothing"
    ),
    "trl pack_dataset (bfd), then its collator": (
        "it writes five of eleven fields, from a table made before, and checks nothing"
    ),
    "pad, then walk back over time": (
        "it walks once over a padded float32 copy; ours sums in float64, and a segment's sums are "
        "the same whatever it is packed with"
    ),
    "Python loop": "it walks once; ours makes passes by the logarithm of the longest sequence",
    "torchrl reward2go": CONVOLUTION,
    "torchrl vec_generalized_advantage_estimate": CONVOLUTION,
    "torch, op by op": "it is the reference itself",
    "torch.compile of it": "it is the reference itself, fused by torch's compiler",
    "boolean mask": "its mask was made before",
    "pad_sequence": COMPILED,
    "aten jagged": COMPILED,
    "fbgemm jagged": COMPILED,
}
