"""The dashboard: one page that shows a plane live, from what anybody may hear on the bus."""
