"""The small generated target: its chats, its tokenizer and its training."""
