"""Sparse targets: layers that compute only some of the tokens."""
