"""What is observed of a model, in one pass, and how it is kept and used again."""

DEFAULT_TRT_VERSION = "10.3.0"  # of a cache's first line where nothing says another
