"""Read pickles without running their code, and write pickles."""
