"""Where experts go when no spare node comes: pure planners over small integer arrays (DESIGN §9)."""
