"""The publisher: turn tuning results into bundles and a registry. Never imported by the client at start-up."""
