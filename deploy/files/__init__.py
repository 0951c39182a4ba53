"""Files: read with limits, written atomically, and listed in a manifest."""
