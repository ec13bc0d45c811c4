"""Pack one conversation of two turns and look at what a trainer gets."""

import trajpack

first = trajpack.Turn(
    prompt_ids=[11, 12, 13],  # "What is 2 + 3?"
    completion_ids=[21, 22],  # "6", end of sequence
    completion_logprobs=[-0.7, -0.1],
    reward=-1.0,
)
second = trajpack.Turn(
    prompt_ids=[11, 12, 13, 21, 22, 31],  # all of the above, then "Wrong, try again."
    completion_ids=[23, 22],  # "5", end of sequence
    completion_logprobs=[-0.4, -0.1],
    reward=1.0,
)
trajectory = trajpack.Trajectory("2+3", [first, second], turn_discount=0.5)

for layout in ("turns", "merged"):
    batch = trajpack.pack([trajectory], layout=layout)
    assert batch.unpack() == [trajectory]
    print(batch)
    print("  input_ids ", batch.input_ids.tolist())
    print("  loss_mask ", batch.loss_mask.int().tolist())
    print("  returns   ", batch.returns.tolist())
    print("  cu_seqlens", batch.cu_seqlens.tolist())
