"""Step time, efficiency and price on other numbers of workers. Pure."""
