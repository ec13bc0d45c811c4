"""`Turn` and `Trajectory`: the input of a pack."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import several
from trajpack.packing.equality import same_turns
from trajpack.packing.representation import brief_repr

IntArray: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
FloatArray: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]] | torch.Tensor


class VersionSpan(NamedTuple):
    """Completion tokens ``[start, end)`` that one version of the policy sampled.

    Attributes:
        version: Number of weight updates before these tokens were sampled.
        start: Index of the first token in the completion.
        end: Index behind the last one.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """One exchange: the prompt the engine saw and the completion it sampled.

    Arrays may be numpy arrays, torch tensors (CPU or CUDA) or plain sequences. A turn keeps the
    given arrays; `TrajectoryBuffer.add` converts and checks them once. Two turns are equal if
    their values are equal, whatever their containers: ids compare as integers, log-probabilities
    as float32, version spans as versions per token, rows of extra fields in the narrower of their
    two dtypes. A turn with values that are no numbers equals itself alone.

    Attributes:
        prompt_ids: Token ids of everything the engine saw: the whole conversation so far.
        completion_ids: Token ids it sampled, stop token included. May be empty.
        completion_logprobs: Natural log-probability of each completion token under the sampling
            policy.
        reward: Reward of this turn, not discounted.
        truncated: True when no end-of-sequence token was sampled.
        version_start: Policy version that sampled the first completion token.
        version_end: Policy version that sampled the last completion token.
        version_spans: ``(version, start, end)`` spans that cover the completion, where the engine
            reports them.
        fields: Rows of the fields that the buffer declares (`TokenField`), by name.
        stop_reason: Why the engine stopped, where it says: ``"stop"``, a stop token or string;
            ``"length"``, a limit of tokens; ``"tool"``, a call; ``"abort"``; ``"error"``.

    Example:
        >>> Turn([1, 2], [3], [-0.5]) == Turn(np.array([1, 2]), torch.tensor([3]), (-0.5,))
        True
    """

    prompt_ids: IntArray
    completion_ids: IntArray
    completion_logprobs: FloatArray
    reward: float = 0.0
    truncated: bool = False
    version_start: int = 0
    version_end: int = 0
    version_spans: Sequence[VersionSpan | tuple[int, int, int]] | None = None
    fields: Mapping[str, Any] | None = None
    stop_reason: str | None = None

    __repr__ = brief_repr

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        return self is other or same_turns(self, other)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def from_call(cls, record: Any, *, fields: Sequence[str] = ()) -> Turn:
        """Return the turn of one call that a server, gateway or toolkit recorded.

        The names are those of `trajpack.trajectories_from_calls`, which makes trajectories of many.

        Args:
            record: A mapping, or an object with attributes.
            fields: Names of extra fields that the record has.

        Raises:
            TypeError: If ids are not integers or log-probabilities not numbers.
            ValueError: If the record has no token ids, none that were sampled, log-probabilities of
                another number, or not one call. The error names the key.

        Example:
            >>> call = {"prompt_ids": [1, 2], "response_ids": [3], "logprobs": [-0.5]}
            >>> Turn.from_call(call) == Turn([1, 2], [3], [-0.5])
            True
        """
        from trajpack.packing.captured_calls import turn_from_call  # it imports `Turn`

        return turn_from_call(record, fields=fields)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All turns of one agent in one episode, oldest first.

    Attributes:
        id: Name of the trajectory in errors and in the packed batch.
        turns: At least one turn.
        group: Name of the group: trajectories of one task, which estimators compare.
        turn_discount: Discount from one turn to the next; estimators have their own discounts of
            tokens.
        task_id: Kind of task, as the data set numbers it.
        birth_time_ms: Start of the episode, milliseconds since the epoch.
        truncated: Whether a limit ended the episode: True cut off, False ended by the environment.
            ``None``: as its last turn says.
    """

    id: str
    turns: Sequence[Turn]
    group: str | None = None
    turn_discount: float = 1.0
    task_id: int | None = None
    birth_time_ms: int | None = None
    truncated: bool | None = None

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        turns = self.turns
        if type(turns) is not tuple:
            expected = f"trajectory {self.id!r}: turns must be a sequence of turns"
            turns = tuple(turns) if type(turns) is list else several(expected, turns)
            object.__setattr__(self, "turns", turns)

    @property
    def is_truncated(self) -> bool:
        """Whether the episode was cut off: `truncated`, or that of the last turn where it is None.

        Example:
            >>> Trajectory("a", [Turn([1], [2], [-0.5], truncated=True)]).is_truncated
            True
        """
        return bool(self.turns[-1].truncated if self.truncated is None else self.truncated)

    @classmethod
    def from_messages(  # noqa: PLR0913 - columns of a data set
        cls,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        id: str = "conversation",
        *,
        group: str | None = None,
        turn_discount: float = 0.0,
        reward: float | None = None,
        tools: Sequence[Any] | str | None = None,
        max_tokens: int | None = None,
        stop_token_ids: Collection[int] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return the turns of a chat, with the tokens that an engine sees and samples.

        Each message of the assistant is a turn. Its prompt is the chat template's text of the
        messages before it, with the generation prompt; its completion is what the message adds to
        that text, up to the stop token. A template that removes old reasoning gives later turns
        other prompts, and so chains of their own: `trajpack.pack_tree` stores what they share
        once. Log-probabilities are 0.

        Args:
            messages: ``role``, ``content`` (a text, or a list of text parts) and what else the
                template reads. The key ``weight`` of an assistant's message, 1 if missing, is the
                reward of its turn; a message of weight 0 is no turn, only context. Arguments of
                tool calls may be JSON text.
            tokenizer: A Hugging Face tokenizer with a chat template.
            id: Name of the trajectory.
            group: As the attribute.
            turn_discount: As the attribute. With 0 the ``returns`` of tokens are the weights of
                their messages.
            reward: Reward of the last turn; the others then have 0.
            tools: Declarations of tools for the template, or their JSON text.
            max_tokens: Turns with more tokens, prompt included, are left out.
            stop_token_ids: Tokens at which the engine stops, such as ``eos_token_id`` of the
                model's generation config. By default the tokenizer's; if the template does not end
                messages with it, the last special token.
            chat_template_kwargs: Further arguments of the template, such as
                ``{"enable_thinking": False}``.

        Raises:
            TypeError: If a message is no mapping with a role, or a weight is no number.
            ValueError: If no turn is left; if a content has an image or another part that is no
                text; if the template cannot render a message, does not continue its generation
                prompt, or does not show a content, a call, reasoning that is trained or a tool's
                name; or if a message has a stop token before its end. The error names the message.

        Warns:
            UserWarning: If messages end without a stop token, have keys that the template does not
                show, or are trained with an empty block of thoughts.

        Example:
            >>> from trajpack.agent import build_tiny_model
            >>> _, tokenizer = build_tiny_model()
            >>> chat = [
            ...     {"role": "user", "content": "2+3?"},
            ...     {"role": "assistant", "content": "6", "weight": 0},
            ...     {"role": "user", "content": "No."},
            ...     {"role": "assistant", "content": "5"},
            ... ]
            >>> turn = Trajectory.from_messages(chat, tokenizer).turns[0]
            >>> tokenizer.decode(turn.completion_ids)
            '5<|im_end|>'
        """
        from trajpack.packing.messages import fitting, turns_of_messages  # it imports `Turn`

        try:
            turns = turns_of_messages(
                messages,
                tokenizer,
                tools=tools,
                stop_token_ids=stop_token_ids,
                chat_template_kwargs=chat_template_kwargs,
            )
            if not turns:
                raise ValueError("no message of the assistant has a weight other than 0")
            turns = fitting(turns, max_tokens)
            if not turns:
                raise ValueError(f"every turn has more than max_tokens={max_tokens} tokens")
        except (TypeError, ValueError) as error:
            raise type(error)(f"trajectory {id!r}: {error}") from error
        if reward is not None:
            turns = [replace(turn, reward=0.0) for turn in turns]
            turns[-1] = replace(turns[-1], reward=reward)
        return cls(id, turns, group, turn_discount)


def several_trajectories(values: Any) -> tuple[Trajectory, ...]:
    """Return the trajectories of an iterable; `validate_turns` checks each.

    Raises:
        TypeError: If it is one trajectory, or no iterable.
    """
    expected = "expected a list of Trajectory"
    if isinstance(values, Trajectory):
        raise TypeError(f"{expected}, got one Trajectory; write pack([trajectory])")
    return several(expected, values)
