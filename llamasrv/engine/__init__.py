"""The scheduler: queue, slots and the main loop. No HTTP and no JSON below this point."""
