"""Networks that this machine only pretends to have: for measuring edge decoding (see `serve.benchmark edge`)."""
