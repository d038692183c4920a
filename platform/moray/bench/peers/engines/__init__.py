"""One module per engine, run by the Python of the environment that has the engine installed.

Such an environment has neither Moray's dependencies nor its versions: all modules but `own` import nothing but their
engine, the standard library and `moray.bench.peers.answering`.
"""
