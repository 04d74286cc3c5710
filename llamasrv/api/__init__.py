"""Request JSON to tasks, results to JSON. No sockets, no web framework."""
