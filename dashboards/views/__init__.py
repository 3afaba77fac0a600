"""The pages of the app, one file each. They lay out what `stored`, `tracked`, `race` and `figures` give; they compute nothing themselves."""
