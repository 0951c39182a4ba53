"""Latency and accuracy of sessions, measured on arrays in memory.

::

    two sessions --> accuracy     errors of outputs, figure of the task --> levels: good, doubtful
                 --> latency      interleaved runs --> speed-up
    one session  --> kernels      time of each kernel or layer

`precision` is the mean average precision against annotated boxes. Sessions are those of
`deploy.tensors`; only `kernels` knows a runtime, and no module a target.
"""

DURATION_S = 3  # of a model's measured runs, if the user does not set it
