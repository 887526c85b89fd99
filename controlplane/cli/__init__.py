"""The `multiplane` command."""
