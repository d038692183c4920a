"""The endpoint for devices that draft themselves."""
