"""Why a build is as it is: what each part, layer, image and channel loses, and what was tried.

::

    report.json, net.plan.toml -> fields (every value checked) -> written (what they say)
    images, the float model, the int8 model -> held (the images and channels that lose most)
                       written + held -> values -> screen, or JSON
"""
