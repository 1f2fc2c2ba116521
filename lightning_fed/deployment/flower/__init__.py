"""Flower as the transport between the server and the sites; the computation is done by separate processes.

Flower's two apps pass bytes on, each to a process on its own machine: the ServerApp to ``lightning-fed serve``, a site's ClientApp
to ``lightning-fed join``.
"""
