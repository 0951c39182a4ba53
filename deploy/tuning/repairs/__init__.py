"""The repair of the float model's weights that lowers the error of its int8 form: `adaround`.

It works on every target, since all are built from the same float model, and is kept only where it
measurably helps, layer by layer::

    model -> observe -> adaround -> files
                        (the ranges stay)

By default it is tried wherever there is a search: it costs a few calibrations and no inference
time.
"""

TITLE = "adaptive rounding"  # its name in sentences
