"""The decoding loop: continuous batching of speculative decoding, for one sequence or many."""
