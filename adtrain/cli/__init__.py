"""The command line, one file a command: parse, call, print. Results go to stdout, progress to stderr."""
