"""OpenAI's dialects: results as the bodies and events of its API."""
