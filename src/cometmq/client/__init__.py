"""Talking to name servers and brokers."""
