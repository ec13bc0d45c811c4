"""JSON of each kind of server, read into a `GenerationOutput`."""
