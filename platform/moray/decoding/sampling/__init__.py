"""Choosing tokens: the target's distribution, acceptance, the end of an answer, and its text."""
