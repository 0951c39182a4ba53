"""Latency and accuracy of sessions: arithmetic on values, no files.

`accuracy.Comparison` compares two sessions' outputs in flat memory, `latency` times sessions,
`levels` holds the limits of the verdict, and `tasks` recognises what outputs are for. Sessions are
those of `deploy.tensors`; nothing here knows a runtime or a target.
"""
