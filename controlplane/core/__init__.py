"""The pure core: events and the time come in, decisions and effects go out."""
