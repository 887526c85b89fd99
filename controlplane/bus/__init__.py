"""The event plane: one protocol, a NATS adapter and an in-memory twin."""
