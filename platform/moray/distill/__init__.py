"""Distillation: masks, losses, optimisers, one training loop and its checkpoints. Knows torch, not Ray."""
