"""The embedded registry: data, read with importlib.resources."""
