"""Results for users to look at: `benchmark`, `comparison`, `explain_build`, `inspection`, others.

Each module is one question about models or finished builds, and returns values that print
themselves; commands import the module they need. Nothing here calibrates or builds, and nothing
below (pipeline, targets, feed ...) imports it.
"""
