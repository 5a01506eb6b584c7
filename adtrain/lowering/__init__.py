"""How each device runs each primitive: rules that name kernels, registered by primitive name."""
