"""Flower carries messages between the server and the sites; all that is done with them is done by processes of our own.

Flower's two apps pass bytes on, each to a process on its own machine: the ServerApp to ``lightning-fed serve``, a site's ClientApp
to ``lightning-fed join``.
"""
