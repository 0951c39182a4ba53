"""`import calib8`: the names of `deploy` under the project's own name.

>>> import calib8
>>> report = calib8.build("model.onnx", "photos/")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deploy

if TYPE_CHECKING:
    from deploy import *  # noqa: F403

__all__ = deploy.__all__


if not TYPE_CHECKING:  # or every misspelt name would pass a type checker

    def __getattr__(name: str) -> object:
        if name not in deploy.__all__:
            raise AttributeError(f"module 'calib8' has no attribute {name!r}")
        return getattr(deploy, name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *deploy.__all__})


# `python -m calib8` would else say nothing, and seem to have built
if __name__ == "__main__":
    from deploy.cli import main

    main()
