"""Decoding, lossless unless asked otherwise: plain and speculative, greedy and sampled, one sequence at a time."""
