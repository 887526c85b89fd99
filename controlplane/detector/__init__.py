"""The detector service: watches what routers decide, and says where a class outgrows its caches."""
