"""Anthropic's Messages API: requests become chat requests, answers become content blocks."""
