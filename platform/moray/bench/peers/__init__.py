"""Compares Moray with other engines on the same prompts, interleaved, with each engine in its own environment."""
