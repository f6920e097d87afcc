"""Interop suite: the official Java client, mqadmin and Apache's brokers against CometMQ."""
