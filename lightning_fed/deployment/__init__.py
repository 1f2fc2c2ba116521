"""Turns at sites that keep their data and private states: the messages, a site, and the server's engine."""
