"""What a model is fed: images and arrays, prepared, one sample at a time."""
