"""A trained network as C that needs only the C library."""
