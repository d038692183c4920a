"""The device's side: the drafter, the client, and what a user sees."""
