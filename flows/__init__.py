"""What happens, in which order: Prefect flows, presets and the command line."""
