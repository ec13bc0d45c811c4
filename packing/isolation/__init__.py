"""A trial of a model with a small packed batch: whether it keeps the sequences apart."""
