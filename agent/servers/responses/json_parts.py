"""Parts of a server's JSON: taken out by kind, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

WeightVersions: TypeAlias = tuple[tuple[str, int, int], ...]
"""``(version, start, end)`` for each span of the completion."""
JSON_NAMES = {
    bool: "a boolean",
    dict: "an object",
    float: "a fraction",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}
LARGE_BODY = 2**20
"""Bytes from which a body is read in one way only: the slower one would hold up everybody."""


class Sample(NamedTuple):
    """The parts of a response: right in kind, their values unchecked."""

    prompt_ids: list[int] | None
    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: str
    weight_versions: WeightVersions | None


def read_either_way(
    body: bytes,
    parts: JsonParts,
    decode: Callable[[bytes], Sample | None] | None,
    read_with_json: Callable[[], Sample],
) -> Sample:
    """Read a body with the fast ``decode`` where there is one, and else with ``json``.

    A large body that the fast one refuses is refused without a second reading: ``json`` holds the
    interpreter for as long as it reads, from whatever thread.

    Raises:
        ValueError: If neither can read it.
    """
    sample = None if decode is None else decode(body)
    if sample is not None:
        return sample
    if decode is not None and len(body) > LARGE_BODY:
        raise parts.refusal("the body", "a sample", f"{len(body)} bytes of another shape")
    return read_with_json()


@dataclass(frozen=True)
class JsonParts:
    """Takes parts out of the responses of one kind of server."""

    server: str
    """The kind, for messages."""

    def refusal(self, where: str, expected: str, got: object) -> ValueError:
        """Return the error for a part of the response that is not as it should be."""
        return ValueError(f"{self.server} response: expected {expected} in {where}, got {got}")

    def parse(self, body: bytes) -> Any:
        """Return a body's JSON, unless it is an error of the server.

        Raises:
            ValueError: If it is no JSON, or an error.
        """
        try:
            # broken characters can only stand in texts, and no text is kept
            response = json.loads(body.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.server} response: expected JSON, but {error}") from None
        if isinstance(response, dict) and not {"choices", "meta_info"} & set(response):
            for name in ("error", "message"):
                if response.get(name):
                    what = f"the error {response[name]!r:.500}"
                    raise self.refusal("the body", "a sample", what)
        return response

    def member(self, where: str, parent: Any, name: str, *kinds: type) -> Any:
        """Return a part of an object; a part that is absent counts as null."""
        if type(parent) is not dict:
            raise self.refusal(where, "an object", JSON_NAMES[type(parent)])
        value = parent.get(name)
        if type(value) not in kinds:
            expected = f"{name!r} to be " + " or ".join(JSON_NAMES[kind] for kind in kinds)
            got = "nothing" if name not in parent else JSON_NAMES[type(value)]
            raise self.refusal(where, expected, got)
        return value

    def numbers(self, where: str, values: list[Any], *kinds: type) -> list[Any]:
        """Return a list whose items are all of ``kinds``: int, or int and float."""
        if not set(map(type, values)) <= set(kinds):
            odd = next(index for index, value in enumerate(values) if type(value) not in kinds)
            expected = "numbers" if float in kinds else "integers"
            got = JSON_NAMES[type(values[odd])]
            raise self.refusal(where, expected, f"{got} at index {odd}")
        return values

    def spans(self, spans: list[Any]) -> WeightVersions:
        """Return what versions of the weights sampled which tokens."""
        return tuple(
            (
                self.member(f"weight_versions[{index}]", span, "version", str),
                self.member(f"weight_versions[{index}]", span, "start", int),
                self.member(f"weight_versions[{index}]", span, "end", int),
            )
            for index, span in enumerate(spans)
        )
