"""What is done with a cache once it is there: verify, measure, compact."""
