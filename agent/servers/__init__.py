"""Engines that generate with HTTP servers: vLLM and SGLang.

`engine` makes a completion of one or more requests, `client` sends them, `engine_response` reads
the responses, `control` chooses and administers servers, `vllm` and `sglang` are the two kinds.
"""
