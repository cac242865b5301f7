"""Side-by-side measurements of shardwise, torch FSDP2, DDP and no sharding: `python -m bench`."""
