"""The edge: Prefect and Dask tasks that load, call the core, and write."""
