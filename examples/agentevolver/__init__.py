"""AgentEvolver's names on the hooks' classes, to be copied into a trainer. Uses public names alone."""
