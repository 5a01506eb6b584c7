"""How times are taken and judged: sampling, statistics, roofline, and the protocol of a measurement."""
