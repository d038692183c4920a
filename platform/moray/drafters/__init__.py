"""Drafters: small trainable models that propose tokens. `configs` holds the union of all of them, which is
the whole registry; `base` says what a drafter is."""
