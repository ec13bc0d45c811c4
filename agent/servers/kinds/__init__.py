"""Kinds of server: how requests of vLLM and SGLang are written, and the settings of a server."""
