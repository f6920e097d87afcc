"""The cometmq command."""
