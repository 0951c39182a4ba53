"""Reading a model: its index, what each placement needs, and bounds of its tensors."""
