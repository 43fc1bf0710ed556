"""Run folders, metrics on disk, the console and plots."""
