"""Commands about a server or about many runs. They import every package below, and no package imports them."""
