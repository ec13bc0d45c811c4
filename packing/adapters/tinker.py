"""tinker's ``Datum``: a sequence without its last token, and the loss inputs of each prediction."""

from __future__ import annotations

from typing import Any

from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.optional import require
from trajpack.packing.rows import layout


def to_datum_kwargs(batch: PackedBatch, *, mask: bool = True) -> list[dict[str, Any]]:
    """Return the parts of a ``Datum`` for each sequence.

    ``model_input`` is a list of the first L - 1 of L tokens, ``loss_fn_inputs`` a dictionary of
    tensors on the host. ``mask=False`` leaves the mask out, which recipes remove. Sequences of
    one token predict nothing and are omitted. Nothing is padded.

    Example:
        >>> from trajpack import GroupEstimator, Trajectory, Turn, pack
        >>> batch = pack([Trajectory("a", [Turn([1, 2], [3, 4], [-0.5, -0.25])])])
        >>> (datum,) = to_datum_kwargs(batch.with_advantages(GroupEstimator("dr_grpo")))
        >>> datum["model_input"], datum["loss_fn_inputs"]["logprobs"]
        ([1, 2, 3], tensor([ 0.0000, -0.5000, -0.2500]))
    """
    layout.check_whole("to_datum_kwargs", batch)
    columns = {
        "target_tokens": batch.input_ids,
        "logprobs": batch.rollout_logprobs,
        "advantages": layout.at_trained(batch, layout.advantages_of("to_datum_kwargs", batch)),
    }
    if mask:
        columns["mask"] = batch.loss_mask.float()
    return [
        {
            "model_input": of["target_tokens"][:-1].tolist(),
            "loss_fn_inputs": {name: values[1:] for name, values in of.items()},
        }
        for of in layout.pieces_of(batch, columns)
        if len(of["target_tokens"]) > 1
    ]


def to_datums(batch: PackedBatch, *, mask: bool = True) -> list[Any]:
    """Return a ``tinker.types.Datum`` for each sequence, with the parts of `to_datum_kwargs`."""
    require("tinker")
    from tinker.types import Datum, ModelInput, TensorData

    return [
        Datum(
            model_input=ModelInput.from_ints(datum["model_input"]),
            loss_fn_inputs={  # cloned, so that the object does not share the batch's memory
                name: TensorData.from_torch(values.clone())
                for name, values in datum["loss_fn_inputs"].items()
            },
        )
        for datum in to_datum_kwargs(batch, mask=mask)
    ]
