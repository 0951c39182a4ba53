"""The PyTorch front end: trace, rewrite, fuse, profile, quantize, train and export a model.

It is based on torch.fx, `torch.fake_quantize_*` and torch.onnx only. Importing it without torch
raises `SdkMissingError`, so commands import it when they run.
"""

from importlib.util import find_spec

from deploy.errors import SdkMissingError, extra_hint

if find_spec("torch") is None:
    raise SdkMissingError(
        f"PyTorch models need torch, which is not installed: {extra_hint('torch')}"
    )
