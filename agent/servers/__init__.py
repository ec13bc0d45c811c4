"""Engines behind HTTP: vLLM and SGLang servers.

`engine` sends requests to many servers; `routing` chooses one, `client` speaks HTTP, `control`
updates weights, and `engine_response` reads a reply into a turn.
"""
