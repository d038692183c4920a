"""Choosing tokens: the target's distribution, acceptance, what ends an answer, and its text."""
