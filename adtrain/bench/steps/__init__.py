"""Times and profiles training steps."""
