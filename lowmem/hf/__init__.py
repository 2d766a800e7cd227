"""What the package does inside Hugging Face libraries."""
