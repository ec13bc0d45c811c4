"""Engines that generate with HTTP servers: vLLM and SGLang.

`engine` turns a request into a completion, over several requests and servers; `routing` chooses a
server, `client` speaks HTTP, `control` administers servers, `vllm` and `sglang` know their HTTP
APIs, and `engine_response` reads a response into arrays.
"""
