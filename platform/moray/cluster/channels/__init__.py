"""Ways for frames to get from a target's process to a drafter's over Ray, beside the socket.

What each of them can do besides being quick is half of the choice; `pipelines.benchmark channels` measures the rest.

    socket          TCP to an address that a lease has told (`decoding.remote.channel`). Any process may connect, any
                    number to one drafter; routing, autoscaling and health stay with Serve, which only gives the lease.
                    A death is seen at once, as a closed connection. Needs a port that is reachable, and a secret.
    actor           a call to the drafter's actor. Ray finds, connects and authenticates; any process that holds the
                    handle may call. A death is seen at once. Serve's replicas are actors too, but calls to them are
                    Serve's own business: drafters would have to live outside it, without its scaling.
    handle          a call through Serve, pinned to one replica. The router sees every cycle (queue lengths, metrics),
                    scaling and health are Serve's, and each cycle pays for that. A death between two calls is no error
                    to the router: the next call waits until another replica has started, and learns it from that one.
    handle tuned    the same by gRPC, the replica's code in the loop that receives it, and no line of log for a call.
                    No frame above 4 MiB, unless all processes are started with a larger limit.
    compiled graph  buffers in memory that both sides share and wait at. The process that compiles it is the only one
                    that sends, from one thread; the actor serves that graph until it is torn down. Actors are fixed: no
                    router, no replicas that come and go, and not one drafter for two targets. A death is seen at once.
"""
