"""The command line, one file for each command. Results go to stdout, progress and notes to stderr."""
