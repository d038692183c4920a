"""Planning: which drafter, how deep, for how many sequences, from acceptance and costs alone."""
