"""OpenAI's Responses API: requests become chat requests, answers become items."""
