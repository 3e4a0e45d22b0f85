"""How an elastic job begins with other ranks: inventory, plan, transfer of state."""
