"""One module per engine, run by the Python of the environment in which the engine is installed.

Such an environment has neither Moray's dependencies nor the same versions. Except for `moray_decoder`, each module
therefore imports only its engine, the standard library and `moray.bench.peers.answering`.
"""
