"""Lossless decoding: plain and speculative, greedy and sampled, one sequence at a time."""
