"""The output, read again from disk and compared."""
