"""Float32 tiles in, stored values out."""
