"""Agents: they ask the engine and the environment, turn by turn, and return a trajectory.

The multi-turn math agent, chat and tool agents, Gymnasium agents, and the
log of answers.
"""
