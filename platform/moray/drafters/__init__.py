"""Drafters: small trainable models that propose tokens. `configs` holds the union of all drafters, which is the
registry; `base` defines what a drafter is."""
