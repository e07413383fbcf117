"""Other libraries' models on this package's modules; each file imports its library lazily, if at all."""
