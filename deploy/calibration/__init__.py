"""What is observed of a model, in one pass, and how it is kept and used again."""
