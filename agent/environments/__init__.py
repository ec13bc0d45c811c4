"""Environments: they judge answers and return rewards and observations.

Math answers are checked in separate processes, programs in the sandbox; Gymnasium environments and
data sets of questions are adapted.
"""
