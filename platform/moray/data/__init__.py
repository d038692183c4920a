"""Chats: the files they come in, the shapes of their rows, and packing them into one small file."""
