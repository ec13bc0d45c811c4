"""Environments: they judge answers and return rewards and observations.

Math answers are checked in separate processes, programs by bubblewrap or the user's own runner;
Gymnasium environments and data sets of questions are adapted. No text of a model is evaluated here.
"""
