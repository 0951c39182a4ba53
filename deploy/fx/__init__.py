"""The torch front end: trace, see, rewrite, fuse, profile, train for int8, export.

Everything in this package stands on torch.fx, `torch.fake_quantize_*` and torch.onnx alone.
Importing it without torch raises `SdkMissingError`, so a command imports it when it runs.
"""

from importlib.util import find_spec

from deploy.errors import SdkMissingError

if find_spec("torch") is None:
    raise SdkMissingError(
        "PyTorch models need torch, which is not installed: pip install 'calib8[torch]'"
    )
