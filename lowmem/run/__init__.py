"""Implements a run of the command line: configuration, data, training and report.

a run     recipe (parser, yaml_file) ─► folder ─► precheck ─► data ─► build ─► training ─► report, publishing
a plan    recipe ─► fake (fake_ranks, known_values) ─► memory ─► plan ─► reductions
"""

from lowmem.errors import require_packages

require_packages("the command line", "transformers", "accelerate", "datasets", "trl", "rich", "matplotlib")
