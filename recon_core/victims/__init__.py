"""The models that get attacked, and their batched training."""
