"""Engines that generate with HTTP servers: vLLM and SGLang.

`engine` makes a completion of one or more requests, `routing` chooses their server, `client` sends
them, `engine_response` reads the responses, `control` administers servers, and `vllm` and `sglang`
hold what is specific to one kind of server.
"""
