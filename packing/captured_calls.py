"""Calls that a server, gateway or toolkit recorded, as trajectories.

A record has the prompt's token ids, the ids that were sampled and their log-probabilities, under
the names of one of `DIALECTS`. Nothing is tokenized, padded or made up: what a record lacks is an
error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import as_ids, as_logprobs, as_number, shown
from trajpack.packing.types import Trajectory, Turn

Record: TypeAlias = Any
"""A mapping, or an object with attributes."""


class Dialect(NamedTuple):
    """The keys of a call in one project's records; a dot parts the keys of nested mappings."""

    projects: str
    prompt: str
    completion: str
    logprobs: str


DIALECTS = (
    Dialect("trajpack", "prompt_ids", "completion_ids", "completion_logprobs"),
    Dialect(
        "NeMo Gym, Switchyard",
        "prompt_token_ids",
        "generation_token_ids",
        "generation_log_probs",
    ),
    Dialect("torchtitan", "prompt_token_ids", "completion_token_ids", "completion_logprobs"),
    Dialect("TRL", "prompt_ids", "output_ids", "output_log_probs"),
    Dialect("rllm", "prompt_ids", "response_ids", "logprobs"),
    Dialect("vLLM", "prompt_token_ids", "token_ids", "logprobs"),
    Dialect("SGLang", "input_ids", "output_ids", "meta_info.output_token_logprobs"),
    Dialect("agent-lightning", "prompt.token_ids", "response.token_ids", "response.logprobs"),
    Dialect("tinker", "ob", "ac.tokens", "ac.maybe_logprobs"),
)
"""The first whose prompt and completion a record has is taken."""
ENVELOPES = ("request", "response", "message")
"""Mappings in a record in which keys are looked up too, as in ``choices`` and their messages."""
CALL_IDS = ("model_call_id", "response_id", "request_id", "meta_info.id")
VERSIONS = (
    ("version_start", "version_end"),
    ("min_policy_version", "max_policy_version"),
    ("policy_version", "policy_version"),
    ("weight_version", "weight_version"),
    ("meta_info.weight_version", "meta_info.weight_version"),
)
"""Keys of the policy versions of the first and the last sampled token, where they are numbers."""
FINISH = ("finish_reason", "meta_info.finish_reason", "ac.stop_reason", "stop_reason")
STOP_REASONS = {
    "stop": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "tool_calls": "tool",
    "function_call": "tool",
    "abort": "abort",
    "error": "error",
}


class Call(NamedTuple):
    """One call of a record: the mappings that have its keys, the most specific first."""

    name: str
    places: Sequence[Any]
    choice: int = 0

    def get(self, *paths: str) -> Any:
        """Return the value of the first key that a place has, ``None`` if none has one."""
        values = (_get(place, path) for path in paths for place in self.places)
        return next((value for value in values if value is not None), None)


def turn_from_call(record: Record, *, fields: Sequence[str] = ()) -> Turn:
    """Return the turn of one recorded call: `trajpack.Turn.from_call`."""
    turns = [turn for call in _calls_of("record", record) for turn in _turns_of(call, fields)]
    if len(turns) != 1:
        raise ValueError(f"record: expected one trained call, got {len(turns)}: {shown(record)}")
    own = _get(record, "reward")
    return turns[0] if own is None else replace(turns[0], reward=as_number("record: reward", own))


def trajectories_from_calls(
    records: Iterable[Record],
    *,
    reward: float | Mapping[Any, float] | Callable[[Any, list[Record]], float] | None = None,
    group: str | Mapping[Any, str] | Callable[[Any, list[Record]], str | None] | None = None,
    session: str | Callable[[Record], Any] | None = "session_id",
    time: str | None = None,
    fields: Sequence[str] = (),
) -> list[Trajectory]:
    """Return a trajectory for each session of recorded calls.

    Each call is a turn. Packing finds by the tokens which call continues which: sub-agents,
    branches and rewritten histories of a session become chains of their own, and the session still
    counts once in its group. A record whose ``trainable`` is false is left out; where a later call
    has its tokens in the prompt, they are context.

    Args:
        records: Mappings, or objects with attributes, in the names of NeMo Gym, Switchyard,
            torchtitan, TRL's ``TurnRecord``, rllm's ``Step``, vLLM, SGLang, agent-lightning's
            ``Triplet``, tinker's ``Transition`` or `Turn`. A server's answer may be the record or
            its ``response``. Each of its ``choices`` is a call, and so is each item of ``output``
            (NeMo Gym) that has token ids.
        reward: Reward of a session, which its last turn gets: a number for all, a mapping by
            session, or a function of session and records. By default the last call of each record
            has the record's ``reward``, 0 without one.
        group: Group of a session: the key of its records, a mapping by session, or a function of
            session and records. By default each session is a group of its own.
        session: Key of a record's session, or a function of the record; ``None`` if all records
            are one session.
        time: Key by which the calls of a session are ordered; by default they are as they come.
        fields: Names of extra fields of the records, such as ``"routed_experts"``.

    Returns:
        Trajectories in the order in which their sessions come first, named by them. A session
        without a trained call has none.

    Raises:
        TypeError: If ids are not integers or log-probabilities not numbers.
        ValueError: If a record has no token ids, none that were sampled, or log-probabilities of
            another number; if it has no session, or the same call is there twice; if a session has
            no reward or no single group. The error names record and key.

    Example:
        >>> records = [
        ...     {
        ...         "session_id": "a",
        ...         "prompt_token_ids": prompt,
        ...         "generation_token_ids": [7],
        ...         "generation_log_probs": [-0.5],
        ...     }
        ...     for prompt in ([1, 2], [1, 2, 7, 3])
        ... ]
        >>> [trajectory] = trajectories_from_calls(records, reward={"a": 1.0})
        >>> [turn.reward for turn in trajectory.turns]
        [0.0, 1.0]
    """
    trajectories = []
    for name, numbered in _sessions(records, session).items():
        if time is not None:
            times = {index: _time(index, record, time) for index, record in numbered}
            numbered.sort(key=lambda entry: times[entry[0]])
        turns = _turns_of_session(numbered, fields, own_rewards=reward is None)
        if not turns:
            continue
        own = [record for _, record in numbered]
        if reward is not None:
            value = _of_session("reward", reward, name, own)
            turns[-1] = replace(turns[-1], reward=as_number(f"session {name!r}: reward", value))
        if isinstance(group, str):
            of_group = _shared(group, name, own)
        else:
            of_group = None if group is None else _of_session("group", group, name, own)
        named = None if of_group is None else str(of_group)
        trajectories.append(Trajectory("session" if name is None else str(name), turns, named))
    return trajectories


def _sessions(
    records: Iterable[Record], session: str | Callable[[Record], Any] | None
) -> dict[Any, list[tuple[int, Record]]]:
    """Return the numbered records of each session."""
    sessions: dict[Any, list[tuple[int, Record]]] = {}
    for index, record in enumerate(records):
        name = None
        if session is not None:
            name = session(record) if callable(session) else _get(record, session)
            if name is None:
                raise ValueError(
                    f"records[{index}]: no session: session={session!r} must be the key of it, or "
                    f"None if all records are one session; got {shown(record)}"
                )
        sessions.setdefault(name, []).append((index, record))
    return sessions


def _turns_of_session(
    numbered: list[tuple[int, Record]], fields: Sequence[str], *, own_rewards: bool
) -> list[Turn]:
    """Return the turns of a session, each call once."""
    turns: list[Turn] = []
    known: dict[Any, str] = {}
    for index, record in numbered:
        before = len(turns)
        for call in _calls_of(f"records[{index}]", record):
            of_call = _turns_of(call, fields)
            for key in _identity(call, of_call):
                if (earlier := known.setdefault(key, call.name)) != call.name:
                    raise ValueError(f"{call.name}: is the call of {earlier} again: leave it out")
            turns.extend(of_call)
        value = _get(record, "reward")
        if own_rewards and value is not None and len(turns) > before:
            value = as_number(f"records[{index}]: reward", value)
            turns[-1] = replace(turns[-1], reward=value)
    return turns


def _calls_of(name: str, record: Record) -> list[Call]:
    """Return the calls of a record: one, or as many as its answer has choices or items."""
    places = [record, *_inner(record, ENVELOPES)]
    places += [inner for place in places[1:] for inner in _inner(place, ENVELOPES)]
    if _dialect(Call(name, places)) is not None:
        return [Call(name, places)]
    calls = []
    for place in places:
        for key in ("choices", "response"):  # SGLang answers n > 1 by a list
            for number, choice in enumerate(_list(_get(place, key))):
                own = [choice, *_inner(choice, ENVELOPES), *places]
                calls.append(Call(f"{name}: {key}[{number}]", own, number))
        items = [
            Call(f"{name}: output[{number}]", [item, *places])
            for number, item in enumerate(_list(_get(place, "output")))
            if any(_get(item, dialect.completion) is not None for dialect in DIALECTS)
        ]
        if items:  # a response says once, of its last call, why it ended
            ending = {"finish_reason": _get(place, "incomplete_details.reason")}
            items[-1] = items[-1]._replace(places=[ending, *items[-1].places])
        calls += items
    return calls or [Call(name, places)]


def _turns_of(call: Call, fields: Sequence[str]) -> list[Turn]:
    """Return the turn of a call; none if it is not trained, several if a mask parts its tokens."""
    trainable = call.get("trainable")
    if trainable not in (None, True, False):
        raise TypeError(f"{call.name}: trainable must be true or false, got {shown(trainable)}")
    if trainable is not None and not trainable:
        return []
    if (dialect := _dialect(call)) is None:
        known = ", ".join(f"{one.prompt} and {one.completion}" for one in DIALECTS)
        there = sorted({key for place in call.places for key in _keys(place)})
        raise ValueError(
            f"{call.name}: no token ids (vLLM has them with return_token_ids): expected {known}; "
            f"got the keys {there}"
        )
    prompt, completion = call.get(dialect.prompt), call.get(dialect.completion)
    prompt = as_ids(f"{call.name}: {dialect.prompt}", getattr(prompt, "to_ints", lambda: prompt)())
    completion = as_ids(f"{call.name}: {dialect.completion}", completion)
    for key, ids in ((dialect.prompt, prompt), (dialect.completion, completion)):
        if not len(ids):
            raise ValueError(f"{call.name}: {key} is empty: no model sampled this call")
    if prompt.tolist() == completion.tolist() == [0]:
        raise ValueError(
            f"{call.name}: token 0 after token 0 is a placeholder, not a sampled token"
        )
    logprobs = _logprobs(call, dialect, completion)
    reason = call.get(*FINISH)
    reason = STOP_REASONS.get(str(_get(reason, "type") or reason))
    truncated = call.get("truncated")
    start, end = _versions(call)
    extra = {key: call.get(key) for key in fields}
    if missing := [key for key, rows in extra.items() if rows is None]:
        raise ValueError(f"{call.name}: the field {missing[0]} is missing")
    turn = Turn(
        prompt,
        completion,
        logprobs,
        truncated=reason in ("length", "abort") if truncated is None else bool(truncated),
        version_start=start,
        version_end=end,
        version_spans=call.get("version_spans"),
        fields=extra or None,
        stop_reason=reason,
    )
    mask = call.get("output_mask")
    return [turn] if mask is None else list(_trained_parts(call, turn, np.asarray(mask)))


def _trained_parts(call: Call, turn: Turn, mask: npt.NDArray[Any]) -> Iterator[Turn]:
    """Yield a turn for each run of tokens that a mask trains; those before it are its prompt."""
    if mask.shape != (len(turn.completion_ids),) or not np.isin(mask, (0, 1)).all():
        expected = f"0 or 1 for each of {len(turn.completion_ids)} tokens"
        raise ValueError(f"{call.name}: output_mask must be {expected}, got {shown(mask.tolist())}")
    if turn.fields and not mask.all():
        raise ValueError(f"{call.name}: fields {list(turn.fields)} with an output_mask of zeros")
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    for start, end in edges.tolist():
        yield replace(
            turn,
            prompt_ids=np.concatenate([turn.prompt_ids, turn.completion_ids[:start]]),
            completion_ids=turn.completion_ids[start:end],
            completion_logprobs=turn.completion_logprobs[start:end],
            truncated=turn.truncated and end == len(mask),
        )


def _logprobs(
    call: Call, dialect: Dialect, completion: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """Return the log-probabilities of the sampled tokens, in whatever form they are."""
    name = f"{call.name}: {dialect.logprobs}"
    values = call.get(dialect.logprobs)
    nested = _get(values, "token_logprobs")
    values = _get(values, "content") if nested is None else nested
    values = call.get(dialect.logprobs) if values is None else values
    if values is None or len(values) != len(completion):
        count = "none" if values is None else len(values)
        raise ValueError(f"{name} must be {len(completion)}, one for each sampled id, got {count}")
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return as_logprobs(name, values)
    rows = [_logprob_and_id(value) for value in values]
    for index, ((logprob, token), sampled) in enumerate(
        zip(rows, completion.tolist(), strict=True)
    ):
        if logprob is None or token not in (None, sampled):
            came = "None" if logprob is None else f"one of token {token}"
            raise ValueError(f"{name}[{index}] must be that of token {sampled}, got {came}")
    return as_logprobs(name, [logprob for logprob, _ in rows])


def _logprob_and_id(value: Any) -> tuple[Any, int | None]:
    """Return a log-probability and the token that it names: a number, a row or a mapping."""
    if isinstance(value, (list, tuple)):  # SGLang: logprob, id, text
        return value[0], value[1] if len(value) > 1 else None
    if isinstance(value, (int, float)) or value is None:
        return value, None
    text = str(_get(value, "token"))  # "token_id:5" by vLLM's return_tokens_as_token_ids
    token = int(text[9:]) if text.startswith("token_id:") else _get(value, "token_id")
    return _get(value, "logprob"), token


def _versions(call: Call) -> tuple[int, int]:
    """Return the versions of the first and the last sampled token; 0 where no number says it."""
    for keys in VERSIONS:
        values = [call.get(key) for key in keys]
        if all(str(value).isdecimal() for value in values):
            return int(values[0]), int(values[1])
    return 0, 0


def _identity(call: Call, turns: list[Turn]) -> list[Any]:
    """Return what no other call of the session has: id and prompt or, without id, all tokens.

    The id alone is not enough: servers may have one request id for all calls of a session.
    """
    answers = [place for place in call.places if _get(place, "choices") is not None]
    ids = [call.get(*CALL_IDS), *(_get(answer, "id") for answer in answers)]
    named = next((one for one in ids if one is not None), None)
    return [
        (named, call.choice, *(np.asarray(part).tobytes() for part in parts))
        for turn in turns
        for sampled in [(turn.completion_ids, turn.completion_logprobs)]
        for parts in [(turn.prompt_ids, *(sampled if named is None else ()))]
    ]


def _dialect(call: Call) -> Dialect | None:
    """Return the first dialect whose prompt and completion a call has."""
    for dialect in DIALECTS:
        if call.get(dialect.prompt) is not None and call.get(dialect.completion) is not None:
            return dialect
    return None


def _of_session(name: str, values: Any, session: Any, records: list[Record]) -> Any:
    """Return the reward or the group of a session: a number, of a mapping, or of a function."""
    if callable(values):
        return values(session, records)
    if not isinstance(values, Mapping):
        return values
    if session not in values:
        raise ValueError(f"{name} has no session {session!r}, only {shown(list(values))}")
    return values[session]


def _shared(key: str, session: Any, records: list[Record]) -> Any:
    """Return the one value of a key in all records of a session."""
    values = {str(value) for record in records if (value := _get(record, key)) is not None}
    if len(values) != 1:
        raise ValueError(f"session {session!r}: {key} must be one value, got {sorted(values)}")
    return values.pop()


def _time(index: int, record: Record, key: str) -> Any:
    value = _get(record, key)
    if value is None:
        raise ValueError(f"records[{index}]: {key} must be the time of the call, got {value}")
    return value


def _get(place: Any, path: str) -> Any:
    """Return the value of a key, or of keys of nested mappings; ``None`` if it is not there."""
    for key in path.split("."):
        if isinstance(place, Mapping):
            place = place.get(key)
        elif isinstance(place, (str, bytes, int, float, list, tuple)):
            return None
        else:
            place = getattr(place, key, None)
    return place


def _inner(place: Any, keys: Sequence[str]) -> list[Any]:
    """Return the mappings or objects that a place has under some keys."""
    values = (_get(place, key) for key in keys)
    plain = (str, bytes, int, float, list, tuple, np.ndarray, torch.Tensor)
    return [value for value in values if value is not None and not isinstance(value, plain)]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _keys(place: Any) -> Iterable[str]:
    return (
        place if isinstance(place, Mapping) else vars(place) if hasattr(place, "__dict__") else ()
    )
