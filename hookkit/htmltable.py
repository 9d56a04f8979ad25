"""."""
from typing import Any
def render(*a: Any) -> str: return ""
def compare(*a: Any) -> Any: return ""
