"""Bytes whose layout is a promise to others: frames, headers, bodies, records. No I/O here."""
