"""The activation cache: runs the target over chats and stores its activations as Parquet for training."""
