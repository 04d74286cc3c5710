"""llamasrv: an HTTP server for language models over libllama, in the shape of llama-server."""
