"""Everything that is TensorRT's own: its tensor names, its caches without a GPU, its engines."""
