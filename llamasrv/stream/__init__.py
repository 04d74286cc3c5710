"""Resumable streams: what was sent is kept for a while, and generation goes on when the connection drops."""
