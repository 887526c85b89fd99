"""The lab: an emulated engine, traces, and runs that compare policies."""
