"""Prefect flows in their order, presets and the command line.

Importing this package turns off Prefect's usage reports and keeps what it starts on loopback,
unless the user's environment says otherwise; it must therefore be imported before prefect. And
before torch, as `tasks`, which it imports first.
"""

import os

import tasks as _first  # noqa: F401  # it says how threads wait

PREFECT_DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_SERVER_API_HOST": "127.0.0.1",
    "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
    "PREFECT_RUNNER_SERVER_HOST": "127.0.0.1",
}

for _name, _value in PREFECT_DEFAULTS.items():
    os.environ.setdefault(_name, _value)
