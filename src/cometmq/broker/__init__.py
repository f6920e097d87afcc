"""What a broker decides: pure, synchronous, driven by cometmq.net."""
