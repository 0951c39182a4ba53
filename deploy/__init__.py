"""The inside of calib8; what a user calls is in the package `calib8`."""

import os

from deploy.version import __version__ as __version__

# else the packages of ONNX Runtime send what they run to Microsoft, and store an identifier
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
