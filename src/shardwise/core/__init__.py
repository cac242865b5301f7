"""The engine; docs/engine.md is its map."""
