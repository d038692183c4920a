"""The server's side of the protocol, without input and output of its own."""
