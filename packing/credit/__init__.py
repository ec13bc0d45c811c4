"""Advantage estimators of a batch.

An estimator is a frozen dataclass (`GRPO`, `GAE`, ...) that names a kernel and its parameters;
`advantages` reads the inputs from a batch and runs it.
"""
