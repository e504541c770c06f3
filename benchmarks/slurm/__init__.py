"""A real Slurm on one machine, and a campaign through it."""
