"""Why a rival is faster, where one is: the tables print it, and a test asks for it.

Each goes on from "Because".
"""

TRUSTS = (
    "it reads each array once and writes it; ours also checks the values, compares prefixes and "
    "stores the tokens, and packs from what is stored: a second pass over memory"
)
LISTS = (
    "converting the lists is most of the time of both, and ours checks every number, and "
    "stores it before it is packed"
)
PER_TURN = (
    "turns are so short that the cost is Python's per turn: ours checks each turn's fields, and "
    "keeps its trajectory's labels; the others list its pieces"
)
PER_CALL = (
    "a batch is so small that the cost is that of the calls: ours makes some hundred of numpy and "
    "torch for the checks and tables of whatever size"
)
CONVOLUTION = (
    "it is one convolution in float32, its filter cut where a power is below 1e-7; ours sums in "
    "float64"
)
FLOAT32 = (
    "it adds in float32; ours in float64, and a segment's sums are the same whatever it is packed "
    "with"
)
MATMUL = (
    "it is a compiled float32 product of whole chunks; ours sums in float64, one step after "
    "another, and a segment's sums are the same whatever it is packed with"
)
COMPILED = "it is a compiled loop over the sequences; ours on the host is written in numpy"
SLICES = (
    "it checks nothing, and its sequences are long; ours checks the plan, and makes the table of "
    "each micro-batch that a device would need"
)
PACKERS = (
    "Python lists",
    "Python lists, 3 fields",
    "numpy.concatenate per field",
    "numpy, memory reused",
    "torch.cat per field",
    "pad, then mask",
    "torch.nested jagged",
    "numpy.concatenate, then a copy",
    "torch.cat per field, then copies",
)
OTHERS = {
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
    "first fit by a scan, as prime-rl's": (
        "lengths are few: the cost is that of some dozens of numpy calls for checks and tables"
    ),
    "longest first by a heap, as SkyRL's": (
        "lengths are few: the cost is that of numpy's calls; it checks nothing and knows no "
        "capacity"
    ),
    "numpy slices, field by field": SLICES,
    "slices and torch.cat, field by field": SLICES,
    "Python loop": "it walks once; ours makes passes by the logarithm of the longest sequence",
    "torchrl reward2go": CONVOLUTION,
    "torchrl vec_generalized_advantage_estimate": CONVOLUTION,
    "chunked matmul, 128 at a time": MATMUL,
    "take out, chunked matmul, 128 at a time": MATMUL,
    "take out, pad, then walk back over time": FLOAT32,
    "loop over columns, as verl's": (
        "sequences are so many and so short that it takes few steps, each one of vectors"
    ),
    "a lane for each sequence, as cugae's": (
        "sequences are so many and so short that lanes walk them at once, in float32"
    ),
    "torch.segment_reduce": FLOAT32,
    "index_add": FLOAT32,
    "index_add, twice": (
        "it adds in float32 and looks at no id; ours also finds each group's extremes, so that "
        "equal scores give exactly 0, and adds in float64, on a device after a stable sort of the "
        "ids, so that sums have one order"
    ),
    "masked_whiten, as verl's": (
        "its passes are of float32, and on all threads; ours, on the host, are numpy's in float64"
    ),
    "torch, op by op": "it is the reference itself",
    "torch.compile of it": "it is the reference itself, fused by torch's compiler",
    "boolean mask": "its mask was made before",
    "pad_sequence": COMPILED,
    "aten jagged": COMPILED,
    "fbgemm jagged": COMPILED,
    "all logits of the rows at once": (
        "it makes each product at once; ours adds those of tiles in float32, and computes again "
        "what `keep_logits` has no memory for, which is a fourth matrix product"
    ),
    "liger chunk of a policy loss": (
        "it makes four products of tiles, too; ours also takes the targets' logits out of the "
        "sums, so that the rest of a distribution is exact"
    ),
    "the matrix products alone": "it folds no logits and computes none again",
    "index, made before": "where each row lies was worked out before",
    "index_select, made before": "where each row lies was worked out before",
    "torch.cat of slices, lengths on the host": "its lengths are on the host, and read there",
}
SMALL = 2**17
"""Tokens up to which a batch is small."""


def reason(name: str, job: str, workload: str, tokens: int) -> str:
    """Return why a contender is faster on a workload; empty where that is not known."""
    if name not in PACKERS:
        return OTHERS.get(name, "")
    if workload.startswith("C:"):
        return PER_TURN
    if tokens <= SMALL:
        return PER_CALL
    return LISTS if job.endswith("from lists") else TRUSTS
