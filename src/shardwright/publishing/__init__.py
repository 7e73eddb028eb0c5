"""Weights that leave a sharded trainer after every step, for samplers, evaluators and files.

each rank, in send()     its own shards, cast, copied to memory of the host: ``shards``
a thread of its own      hands that memory over, beside the next step: ``publisher``
                         over TCP, as what has changed: ``versions``, ``server``, ``frames``
                         into a folder, a bucket or shared memory: ``folders``
other processes          ``receiver``, with ``client`` for TCP; loaders of engines: ``engines``
"""
