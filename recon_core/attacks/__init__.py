"""The attack families. Each is one file and one member of `recon_core.experiments`."""
