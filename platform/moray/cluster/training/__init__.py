"""Distillation on Ray Train: the driver, its workers, what they read, and validation beside them."""
