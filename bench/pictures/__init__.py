"""The pictures of docs/, each made of a run of this machine: ``python -m bench.pictures [NAME ...]``.

A module per picture: ``record(folder)`` runs what is to be seen, in a folder of its own, and returns what is
drawn of it (JSON); ``draw(found, out)`` draws that.
"""
