"""Files: read with limits, written whole or not at all, and noted in a manifest."""
