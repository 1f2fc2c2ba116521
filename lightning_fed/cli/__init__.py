"""The command line: configuration to objects.

Each verb has ``run(args)`` in a file of its name, and a line in ``SUBCOMMANDS`` of ``lightning_fed/__main__.py``; ``fit.py`` has
``validate``, ``test``, ``predict`` and ``export``, too. The other files are what verbs have in common: how options are read
(``parser``, ``options``, ``environment``), refused (``checks``, ``refusals``, ``trainer``) and described (``help/``; ``quick_help``
looks into its index, made of ``all_parsers``). ``load_run`` opens in Python what they played, ``fork_server`` is the process that a
sweep's runs are forked from.
"""
