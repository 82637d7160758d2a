"""Small programs with `engine.client`, to read and to run against a system that serves."""
