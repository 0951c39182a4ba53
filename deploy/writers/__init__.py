"""File formats, pure: no SDK, no device."""
