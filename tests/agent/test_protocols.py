from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trajpack.agent.protocols import GenerationOutput, SamplingParams


def bundled(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "qid": "q7@1",
        "prompt_ids": [5, 6, 7],
        "output_ids": [[8, 9]],
        "seqs": [[5, 6, 7, 8, 9]],
        "logprobs": [[0.0, 0.0, -0.25, -0.5]],
        "no_eos": [True],
        "version_start": [3],
        "version_end": [4],
    }
    return SimpleNamespace(**(fields | changes))


def test_bundled_outputs_lose_the_zeros_on_the_prompt() -> None:
    assert GenerationOutput.from_bundled(bundled()) == GenerationOutput(
        qid="q7@1",
        prompt_ids=[5, 6, 7],
        output_ids=[8, 9],
        output_logprobs=[-0.25, -0.5],
        no_eos=True,
        version_start=3,
        version_end=4,
    )


def test_an_empty_completion_is_converted() -> None:
    empty = bundled(output_ids=[[]], seqs=[[5, 6, 7]], logprobs=[[0.0, 0.0]])
    output = GenerationOutput.from_bundled(empty)
    assert (output.output_ids, output.output_logprobs) == ([], [])


def test_the_converted_lists_are_not_shared() -> None:
    source = bundled()
    output = GenerationOutput.from_bundled(source)
    source.prompt_ids.append(1)
    source.output_ids[0].append(1)
    assert (output.prompt_ids, output.output_ids) == ([5, 6, 7], [8, 9])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seqs": []}, "'q7@1': expected 1 samples in seqs, got 0"),
        ({"output_ids": [[8, 9], [8]]}, "'q7@1': expected 1 samples in output_ids, got 2"),
        ({"no_eos": [True, True]}, "'q7@1': expected 1 samples in no_eos, got 2"),
        ({"seqs": [[5, 6, 7, 8]]}, r"'q7@1': expected 5 tokens in seqs\[0\], got 4"),
        ({"logprobs": [[-0.5] * 5]}, r"'q7@1': expected 4 entries in logprobs\[0\], got 5"),
        ({"seqs": [[5, 6, 7, 8, 8]]}, r"'q7@1': seqs\[0\] is not the prompt and the output"),
        ({"prompt_ids": []}, "'q7@1': expected a prompt, got no tokens"),
    ],
)
def test_bundled_outputs_that_do_not_fit_together_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationOutput.from_bundled(bundled(**changes))


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_new_tokens", 0), ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)],
)
def test_sampling_out_of_range_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} must be .*, got {value}"):
        SamplingParams(**{option: value})  # type: ignore[arg-type]
