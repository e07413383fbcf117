"""The package's tests; `tests.cases` holds the sample inputs."""
