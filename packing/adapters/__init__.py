"""One module per trainer: a packed batch in the format that the trainer takes, and back.

Docstrings of the functions do not repeat these rules of all formats:

- Keys, dtypes and shapes are tables of ``docs/formats/``, a page for each module.
- ``B`` rows are the sequences of the batch, in either layout. The prompt of a row is everything
  before its first generated token, the response is the rest, observations included. ``*`` is the
  shape of an extra field. Tensors stay on the batch's device, lists are on the host.
  ``pad_token_id`` is the token id at padding.
- Where a reward is of a row and an option chooses it, ``"rewards"`` is the sum over its turns, not
  discounted, and ``"returns"`` the discounted return of its first turn.
- ``to_*`` raise a `ValueError` for a batch without advantages if the format has them, for an
  option that is none of those listed, and for an extra field with the name of another key; a
  `TypeError` for a micro-batch where the format is of whole batches; a `ModuleNotFoundError` if
  they need a trainer's package that is not installed.
- ``from_*`` make a turn of each run of generated tokens, with everything before it as prompt. Turns
  that generated nothing, or had no token between them, are lost or joined. ``ids`` of trajectories
  are their group and a number if ``None``; ``groups`` are none if ``None``. ``missing_reward`` is
  the reward of a row that has none, or whose own is ``None``: such a row is refused if this is
  ``None`` too. ``fields`` are extra fields to read into `Turn.fields`; ``"sampling_mask"`` is
  one for a ragged `TokenField`.
- ``from_*`` raise a `ValueError` if a key, a reward or a field is missing, a reward is not finite,
  lengths or shapes disagree, labels are not as many as rows, or a row begins with a generated
  token; if there are images, or data of a field that is not named (routes are left out then); a
  `TypeError` if arrays hold no numbers. They copy tensors to the host, which synchronises.
"""

from trajpack.packing.adapters import (
    areal as areal,
    flash_attention as flash_attention,
    huggingface as huggingface,
    megatron as megatron,
    nemo_rl as nemo_rl,
    openrlhf as openrlhf,
    prime_rl as prime_rl,
    skyrl as skyrl,
    slime as slime,
    tinker as tinker,
    torchtitan as torchtitan,
    trl as trl,
    verl as verl,
)
