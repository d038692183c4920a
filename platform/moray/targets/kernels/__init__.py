"""Linear layers on a CPU: torch's, oneDNN's with packed weights, and Moray's compiled ones; the fastest are chosen."""
