"""Building blocks of drafters: layers, attention, caches for drafting, and visibility in training."""
