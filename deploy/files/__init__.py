"""Files: read with limits, written atomically, and listed in a manifest.

Every file comes in through `reading` and goes out through `atomic` or a stage of `staging`; `toml`
and `usercode` read settings and a user's own functions. Any room may import these modules. Nothing
here knows models, and nothing is ever unpickled.
"""
