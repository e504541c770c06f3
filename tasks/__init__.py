"""The edge: Prefect and Dask tasks that load, call the core, and write.

Importing this package lets waiting threads sleep (`tasks.cluster.process_settings`); it must
therefore be imported before torch and numpy.
"""

import os

from tasks.cluster.process_settings import waiting_settings

__version__ = "0.1.0"
"""Of the release, read by pyproject.toml; the installed distribution is `palimpsest-audit`."""

os.environ.update(waiting_settings(os.environ))
