"""How a run of operations is executed: the contract of an operation, forward, backward, and what is kept in between."""
