"""What is on disk: the commit log, the consume queues and the key index. See store.py."""
