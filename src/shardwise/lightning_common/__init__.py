"""What the strategies for Lightning's Trainer and for Fabric share."""
