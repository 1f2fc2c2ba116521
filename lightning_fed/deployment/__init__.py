"""Turns at sites that keep their data and their private states: what is said, who says it at a site, and the server's engine."""
