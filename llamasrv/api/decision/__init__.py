"""POST /v1/systemone: typed questions, answered by a decision model in one pass each."""
