"""Moray: train, sweep and serve speculative-decoding drafters on Ray."""
