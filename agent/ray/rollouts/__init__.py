"""Rollout workers on a Ray cluster: actors that run episodes, restarts, dispatch of prompts."""
