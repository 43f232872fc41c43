"""What a client may ask for."""
