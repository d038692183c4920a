"""A run's figures: on disk, in TensorBoard and in experiment trackers."""
