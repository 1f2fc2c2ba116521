"""The command line: configuration to objects.

Each verb has ``run(args)`` in a file of its name, and a line below; ``fit.py`` has all of a federation's, and ``all_parsers``
names the others. The other files are what verbs have in common: how options are read (``parser``, ``options``, ``environment``),
refused (``checks``, ``refusals``, ``trainer``) and described (``help/``; ``quick_help`` looks into its index). ``load_run`` opens
in Python what they played, ``fork_server`` is the process that a sweep's runs are forked from.
"""

SUBCOMMANDS = {
    "fit": "train a federation",
    "validate": "measure a run's clients on their validation data",
    "test": "measure a run's clients on their test data",
    "predict": "write what clients' models predict of their test examples",
    "export": "write a client's or the server's model for use elsewhere",
    "privacy": "what a configuration's rounds cost in privacy, and whether it will learn",
    "configs": "list the configurations that come along, or print one",
    "sweep": "play a comparison: methods, settings and seeds",
    "runs": "list what was played: rounds, monitor, size on disk",
    "report": "tables and pictures of finished runs",
    "completion": "how bash or zsh completes these commands",
    "serve": "lead a study whose data stay at their sites",
    "join": "take part in one, with data that stay here",
}
"""A new one has a line here, and ``run(args)`` in a file of its name in ``cli/``."""

OF_FEDERATION = ("fit", "validate", "test", "predict", "export", "privacy")
"""Those that are methods of :class:`lightning_fed.Federation`: ``fit.py`` has all of them."""
