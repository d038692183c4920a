"""What a sparse target is worth: quality and speed beside its dense one and fair baselines."""
