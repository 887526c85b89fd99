"""The control plane: pure core, event bus, services and command line."""
