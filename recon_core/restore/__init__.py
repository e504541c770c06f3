"""Restorers: from a reconstruction to an estimate of the original."""
