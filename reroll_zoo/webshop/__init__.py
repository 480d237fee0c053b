"""WebShop: a text shop over a synthetic catalogue of any size."""
