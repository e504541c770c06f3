"""Maths only: tensors in, tensors out. No files, no orchestration, no global state."""
