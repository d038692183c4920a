"""Drafting in another process: the messages, the process that answers them, and the transport. No Ray."""
