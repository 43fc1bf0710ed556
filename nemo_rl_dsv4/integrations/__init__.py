"""Other trainers that this package's parts run under."""
