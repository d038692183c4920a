"""The activation cache: chats in, the target's activations out, as Parquet that training reads."""
