"""Draft sources, one a file."""
