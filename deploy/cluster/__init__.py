"""A calibration on many machines, by a scheduler of dask.distributed that is there already.

::

    client (this machine)              scheduler            workers
    feed: which images, in n pieces --> tasks ----------->  observe_piece: open, run, count
    gather: merged as they come  <----- bytes of shards <-- (a lost worker's pieces go elsewhere)

Dask pickles what it sends, so that whoever reaches the scheduler can run code on all of these
machines: it must be trusted, as dask says. What a worker gives back is a shard's bytes, which are
read as those of a file are.
"""
