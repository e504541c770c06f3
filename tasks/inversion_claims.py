"""placeholder"""
from typing import Any
from collections.abc import Mapping
def check_inversion(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    return []
