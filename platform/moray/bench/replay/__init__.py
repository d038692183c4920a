"""Decoding again what a target has written once, without the target."""
