"""The version, a plain literal: packaging reads it without importing anything."""

__version__ = "0.1.0"
