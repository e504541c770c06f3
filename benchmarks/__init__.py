"""Measurements by subject, claims by paper (`papers`), and the pages made from them (`results`)."""

import tasks as _first  # noqa: F401  # it says how threads wait, before torch is loaded
