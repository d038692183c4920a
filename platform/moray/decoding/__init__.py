"""Decoding, lossless unless requested otherwise: one loop for one sequence or many, with or without drafts."""
