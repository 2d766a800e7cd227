"""One run of the command line: configuration, data, training, report."""
