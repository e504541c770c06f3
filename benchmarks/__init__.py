"""Measurements by subject, claims by paper (`papers`), and the pages made from them (`results`)."""
