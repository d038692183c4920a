"""The endpoint for devices that run the drafter."""
