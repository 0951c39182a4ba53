"""Ascend's own files: write them by scales that are known, and check them.

`calib8.build(model, images, targets=["ascend"])` calibrates and writes them too.

>>> calib8.ascend.deploy("model.onnx", "edited_record.txt", out="build")
"""

from deploy.pipeline.deployment import TrialInputs, convert, deploy
from deploy.targets.ascend.existing_files import check_file as check

__all__ = ["TrialInputs", "check", "convert", "deploy"]
