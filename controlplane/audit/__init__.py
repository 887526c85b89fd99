"""Following, checking and exporting what the plane has said on the bus."""
