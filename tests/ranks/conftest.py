"""Starts the server of ranks while the tests are still being collected (see pool.py)."""

from tests.ranks.pool import start_server

start_server()
