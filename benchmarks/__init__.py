"""One script per claim of speed, and the page made from what they measured."""
