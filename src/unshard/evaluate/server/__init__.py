"""The server: who may ask, what for, and over which protocol. HTTP stands in this folder only."""
