"""From a command line to checked settings: `schema` is the tree, `checks` its cross-field rules; `composing` and `sections` tell all mistakes."""
