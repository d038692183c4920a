"""A smaller model made of a target's own weights, to start a drafter from."""
