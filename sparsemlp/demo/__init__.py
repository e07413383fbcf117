"""The demo: a real language model made sparse, its quality and speed measured. See docs/demo.md."""
