"""A run's metrics: on disk, in TensorBoard and in experiment trackers."""
