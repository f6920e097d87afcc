"""The only asyncio on the server side: runs a core on real sockets."""
