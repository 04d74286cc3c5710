"""Many clients, most of them badly behaved, on one server; and what must hold all the same."""
