"""Split decoding over a network: the drafter on the user's device, the target on a server. Independent of Ray."""
