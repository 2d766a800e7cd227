"""What training takes: measured, not declared."""
