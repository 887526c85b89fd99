"""The router: HTTP in, a decision, HTTP out."""
