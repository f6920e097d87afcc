"""A whole cluster in one thread, under a seed: for tests of CometMQ and of programs around it."""
