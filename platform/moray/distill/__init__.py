"""Distillation: masks, losses, optimizers, one training loop and its checkpoints. Uses torch, not Ray."""
