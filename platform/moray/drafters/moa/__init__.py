"""Mixture of Attentions for one N or for several, and the parts that only it uses."""
