"""The subcommands of `calib8`: options and printing, no logic.

A command is a function with a row in `COMMANDS` of `deploy.cli`, which imports it when it runs.
`base` and the `*_options` modules are shared by commands; nothing outside imports from here. Heavy
packages are imported inside the functions, never at the top.
"""
