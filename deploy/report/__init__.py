"""What a run found, as JSON, Markdown, an HTML page and one screen of text.

`Report` (in `model`) holds plain values and nothing else; each form is one file of pure functions.
"""

from deploy.report.html import to_html
from deploy.report.markdown import to_markdown
from deploy.report.model import (
    CalibrationPart,
    EngineRow,
    FeedPart,
    FileRow,
    ModelPart,
    NodeRow,
    Report,
    TensorRow,
    tensor_rows,
    to_json,
)
from deploy.report.screen import to_screen

__all__ = [
    "CalibrationPart",
    "EngineRow",
    "FeedPart",
    "FileRow",
    "ModelPart",
    "NodeRow",
    "Report",
    "TensorRow",
    "tensor_rows",
    "to_html",
    "to_json",
    "to_markdown",
    "to_screen",
]
