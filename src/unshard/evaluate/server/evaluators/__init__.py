"""The programs that evaluate a model, and what they leave."""
