"""The engine inside this process: continuous batching of a transformers model."""
