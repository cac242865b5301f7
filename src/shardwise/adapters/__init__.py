"""What the adapters to other frameworks share."""
