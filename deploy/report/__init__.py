"""A run's results as JSON, Markdown, an HTML page and one screen of text.

`Findings` (in `model`, made of `parts`) holds plain values; each output format is a module of pure
functions; `Report` adds `repr` and the notebook's display.
"""

from deploy.report.html import to_html
from deploy.report.markdown import to_markdown
from deploy.report.model import to_json
from deploy.report.parts import (
    CalibrationPart,
    EngineRow,
    FeedPart,
    FileRow,
    GroupRow,
    HistogramPart,
    ModelPart,
    NodeRow,
    RangeRow,
    SearchPart,
    TargetPart,
    TensorRow,
    TrialRow,
    WeightRow,
    WorkPart,
    node_rows,
    tensor_rows,
)
from deploy.report.report import Report
from deploy.report.screen import to_screen

__all__ = [
    "CalibrationPart",
    "EngineRow",
    "FeedPart",
    "FileRow",
    "GroupRow",
    "HistogramPart",
    "ModelPart",
    "NodeRow",
    "RangeRow",
    "Report",
    "SearchPart",
    "TargetPart",
    "TensorRow",
    "TrialRow",
    "WeightRow",
    "WorkPart",
    "node_rows",
    "tensor_rows",
    "to_html",
    "to_json",
    "to_markdown",
    "to_screen",
]
