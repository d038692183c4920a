"""Targets: what a drafter may know of them, the unmodified model with its taps, and the embedded demo target."""
