"""Messages between ranks, and how ranks tell each other why they stop."""
