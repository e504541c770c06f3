"""The attack families: a room each, and what every run of them shares."""
