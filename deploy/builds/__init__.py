"""Builds that were written before: read back whole, and held side by side."""

from deploy.analysis.builds import Builds, EngineLine, SettingLine, compare
from deploy.builds.forms import to_html, to_json, to_screen
from deploy.builds.read import Build, read_build

__all__ = [
    "Build",
    "Builds",
    "EngineLine",
    "SettingLine",
    "compare",
    "read_build",
    "to_html",
    "to_json",
    "to_screen",
]
