"""Answers of vLLM in each of the shapes that it has for them."""

from __future__ import annotations

import json
from typing import Any

from trajpack.agent.servers.engine_response import ResponseLimits

LIMITS = ResponseLimits(max_tokens=64, vocab_size=1000)
IDS = [207, 129, 350]
LOGPROBS = [-6.238356590270996, -5.727456569671631, -5.730677604675293]
PROMPT = [369, 349, 198, 20, 21]


def choice(**changes: Any) -> dict[str, Any]:
    return {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": IDS} | changes


def generate(**changes: Any) -> dict[str, Any]:
    """``/inference/v1/generate``."""
    content = [
        {"token_id": i, "logprob": v, "rank": 3, "top_logprobs": [{"token_id": i, "logprob": v}]}
        for i, v in zip(IDS, LOGPROBS, strict=True)
    ]
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}]
    defaults = {"logprobs": {"content": content}, "weight_versions": spans}
    return {"prompt_token_ids": None, "choices": [choice(**(defaults | changes))]}


def completions(**changes: Any) -> dict[str, Any]:
    """``/v1/completions``."""
    logprobs = {
        "text_offset": [0, 1, 1],
        "token_logprobs": LOGPROBS,
        "tokens": ["\x13", "", "ant"],
        "top_logprobs": [{"\x13": -6.2}, {"": -5.7}, {"ant": -5.7}],
    }
    defaults = {"text": "\x13\ufffdant", "logprobs": logprobs, "prompt_token_ids": PROMPT}
    return {"object": "text_completion", "choices": [choice(**(defaults | changes))]}


def chat(**changes: Any) -> dict[str, Any]:
    """``/v1/chat/completions``: prompt ids at the top."""
    content = [{"token": "é", "logprob": v, "bytes": [19], "top_logprobs": []} for v in LOGPROBS]
    defaults = {"message": {"role": "assistant"}, "logprobs": {"content": content}}
    return {"prompt_token_ids": PROMPT, "choices": [choice(**(defaults | changes))]}


def encode(response: Any) -> bytes:
    return json.dumps(response).encode()
