"""How fast, how many bytes, which instructions: timing, records with provenance, traffic, offline compilation."""
