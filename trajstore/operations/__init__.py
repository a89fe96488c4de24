"""Looking at directories: what lies there, what it holds, whether it is whole."""
