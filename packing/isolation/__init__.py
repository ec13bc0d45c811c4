"""A trial of a model: whether it keeps the sequences of a packed batch, or branches, apart."""
