"""The command line, which builds objects from a configuration.

Each verb has ``run(args)`` in a file of its name and a line below; ``fit.py`` has all verbs of a federation, and ``all_parsers``
lists the others. The other files hold what verbs have in common: how options are read (``parser``, ``options``), refused
(``checks``, ``refusals``, ``trainer``) and described (``help/``; ``quick_help`` looks into its index). ``load_run`` opens their
runs in Python; ``fork_server`` is what the process imports from which a sweep's runs are forked.
"""

SUBCOMMANDS = {
    "fit": "train a federation",
    "validate": "evaluate a run's clients on their validation data",
    "test": "evaluate a run's clients on their test data",
    "predict": "write the clients' predictions for their test examples",
    "export": "write a client's or the server's model for use elsewhere",
    "privacy": "privacy cost of a configuration's rounds, and whether it can learn",
    "configs": "list the configurations that come with the package, or print one",
    "sweep": "run a comparison: methods, settings and seeds",
    "runs": "list runs: rounds, monitor, size on disk",
    "report": "tables and pictures of finished runs",
    "completion": "set up completion in bash or zsh",
    "serve": "run the server of a study whose data stay at their sites",
    "join": "take part in such a study; the data stay on this machine",
}
"""A new verb needs a line here. One that is no method of :class:`lightning_fed.Federation` has a file of its name in ``cli/``, with
``parser()`` and ``run(args)``.
"""

OF_FEDERATION = ("fit", "validate", "test", "predict", "export", "privacy")
"""Verbs that are methods of :class:`lightning_fed.Federation`; all are in ``fit.py``."""
