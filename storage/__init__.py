"""Images in, pairs on disk: numpy arrays, Zarr parts, receipts, streams, checkpoints."""
