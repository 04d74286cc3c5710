"""Sockets, the WSGI application and event streams."""
