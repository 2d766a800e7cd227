"""Implements a run of the command line: configuration, data, training and report."""

from lowmem.errors import require_packages

require_packages("the command line", "transformers", "accelerate", "datasets", "trl", "rich", "matplotlib")
