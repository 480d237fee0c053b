"""WebShop: a text shop over a synthetic catalogue of any size."""

from reroll.envs.webshop.env import WebShop

__all__ = ["WebShop"]
