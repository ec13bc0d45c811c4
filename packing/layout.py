"""Names of the layouts."""

from typing import Literal, TypeAlias

Layout: TypeAlias = Literal["merged", "turns"]
"""Unit of a sequence of a packed batch: a chain (``"merged"``) or a turn (``"turns"``)."""
LAYOUTS = ("merged", "turns")
