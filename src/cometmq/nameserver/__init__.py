"""Where topics live: the name server's decisions, pure and synchronous."""
