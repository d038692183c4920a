"""Mixture of Attentions for one N, or for several at once, and the parts that only it has."""
