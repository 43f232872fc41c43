"""Attacks, damage and random bytes: what files of others may try, and what comes of it."""
