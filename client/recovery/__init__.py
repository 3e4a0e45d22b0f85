"""From a start to the first new step: inventory, plan, retrieval, load, replay, verification."""
