"""The edge: Prefect and Dask tasks that load, call the core, and write.

Importing this package lets waiting threads sleep (`tasks.cluster.idle_threads`); it must therefore
be imported before torch and numpy.
"""

from tasks.cluster.idle_threads import let_threads_sleep

__version__ = "0.1.0"
"""Of the release, read by pyproject.toml; the installed distribution is `palimpsest-audit`."""

let_threads_sleep()
