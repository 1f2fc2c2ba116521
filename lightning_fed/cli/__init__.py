"""The command line: configuration to objects, one file per verb."""
