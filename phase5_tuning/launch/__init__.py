"""How a call is launched: its tiles, its plan, and a launch that skips what nobody listens to."""
