"""The sidecar beside each engine: publishes KV-cache blocks and load to the bus."""
