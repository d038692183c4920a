"""Whether to draft, how deep, with which N and how many nodes: costs, acceptance and the choice between them."""
