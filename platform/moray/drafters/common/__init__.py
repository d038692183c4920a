"""What drafters are built from: layers, attention, caches while drafting, what positions see in training."""
