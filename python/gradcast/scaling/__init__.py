"""Step time and cost on other numbers of workers. Pure."""
