"""What a person starts: command line, start-up, signals."""
