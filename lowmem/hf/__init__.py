"""The parts of the package that work inside Hugging Face libraries."""
