"""Engines inside this process: continuous batching of a transformers model, and functions."""
